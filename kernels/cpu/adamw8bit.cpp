// Adam whose moments rest in 8 bits each: a code of a table times the scale of its block. See reference.py.

#include "update.h"

namespace {

constexpr int32_t CODES = 256;
// The upper bits of a magnitude, from 2^-24 to 1, choose a cell; no cell holds more than one border between codes.
constexpr int32_t CELL_SHIFT = 15;
constexpr uint32_t FIRST_CELL = (127 - 24) << 8;
constexpr uint32_t CELLS = (24 << 8) + 1;

struct Table {
    const float* values;  // CODES of them, ascending
    float borders[CODES];  // halfway between a code and the next; the last is never passed
    uint8_t lowest[2][CELLS + 1];  // by sign and cell: the code of the cell's least value
    int32_t zero;  // the code of 0

    explicit Table(const float* codes) : values(codes) {
        for (int32_t i = 0; i + 1 < CODES; ++i) borders[i] = (codes[i] + codes[i + 1]) / 2;
        borders[CODES - 1] = HUGE_VALF;
        zero = searched(0);
        for (uint32_t cell = 0; cell <= CELLS; ++cell) {
            const float nearer = cell ? float_of((FIRST_CELL + cell - 1) << CELL_SHIFT) : 0;
            const float farther = float_of((FIRST_CELL + cell) << CELL_SHIFT);
            lowest[0][cell] = static_cast<uint8_t>(searched(nearer));
            lowest[1][cell] = static_cast<uint8_t>(searched(-farther));
        }
    }

    // The nearest code, the lower of two.
    int32_t searched(float value) const {
        return static_cast<int32_t>(std::lower_bound(borders, borders + CODES - 1, value) - borders);
    }

    // The same for magnitudes up to 1; the code of 0 for a NaN.
    int32_t code_of(float value) const {
        const uint32_t bits = bits_of(value), magnitude = bits & 0x7FFFFFFF;
        if (magnitude > 0x7F800000) return zero;
        const int32_t above = static_cast<int32_t>(magnitude >> CELL_SHIFT) - static_cast<int32_t>(FIRST_CELL) + 1;
        const int32_t cell = std::clamp<int32_t>(above, 0, CELLS);
        const int32_t low = lowest[bits >> 31][cell];
        return low + (borders[low] < value);
    }

    void read(const uint8_t* codes, float scale, float* to, int64_t numel) const {
        for (int64_t i = 0; i < numel; ++i) to[i] = values[codes[i]] * scale;
    }

    // Returns the scale: the value of the largest magnitude, the positive one of two.
    // With `keeps` no value above 0 becomes 0: it is what a step is divided by.
    float write(const float* from, uint8_t* codes, int64_t numel, bool keeps) const {
        const float most = largest(from, numel);
        int32_t positive = most != most;
        for (int64_t i = 0; i < numel; ++i) positive |= from[i] == most;
        const float scale = positive ? most : -most;
        for (int64_t i = 0; i < numel; ++i) {
            const int32_t code = code_of(from[i] / scale);
            codes[i] = static_cast<uint8_t>(code + (keeps && code == zero && from[i] > 0));
        }
        return scale;
    }
};

}  // namespace

extern "C" void zlab_adamw8bit(void* master, int32_t master_dtype, const void* grad, int32_t grad_dtype,
                               uint8_t* exp_avg, float* exp_avg_scale, uint8_t* exp_avg_sq, float* exp_avg_sq_scale,
                               const float* signed_codes, const float* unsigned_codes, const float* grad_scale,
                               void* out, int32_t out_dtype, int64_t numel, int64_t threads, float decay, float l2,
                               float weight1, float beta2, float weight2, float correction, float eps,
                               float minus_step_size) {
    const AdamNumbers numbers{decay, l2, weight1, beta2, weight2, correction, eps, minus_step_size};
    const Master target{master, master_dtype, out, out_dtype, numel >= STREAM_NUMEL};
    const AdamBlock block = adam_block_for(numbers);
    const Table signs(signed_codes), magnitudes(unsigned_codes);
    in_blocks(numel, threads, [&](int64_t start, int64_t n) {
        alignas(64) float wide_weights[BLOCK], wide_grads[BLOCK], first[BLOCK], second[BLOCK];
        float &first_scale = exp_avg_scale[start / BLOCK], &second_scale = exp_avg_sq_scale[start / BLOCK];
        const float* grads = widened(at(grad, grad_dtype, start), grad_dtype, wide_grads, n);
        float* weights = target.open(start, wide_weights, n);
        signs.read(exp_avg + start, first_scale, first, n);
        magnitudes.read(exp_avg_sq + start, second_scale, second, n);
        block(weights, grads, first, second, *grad_scale, numbers, n);
        target.close(weights, start, n);
        first_scale = signs.write(first, exp_avg + start, n, false);
        second_scale = magnitudes.write(second, exp_avg_sq + start, n, true);
    });
}
