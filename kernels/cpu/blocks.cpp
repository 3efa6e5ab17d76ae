// Block-wise quantisation: one fp32 scale for BLOCK elements. The formats are told in reference.py.

#include <cfloat>

#include "common.h"

namespace {

// Codes of one block: values / scale to the nearest integer of at most `top`, and 0 where that is no number.
void integers(const float* __restrict values, float scale, float top, int32_t* __restrict codes, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
        const float code = std::nearbyint(values[i] / scale);
        const float kept = std::min(std::max(code, -top), top);
        codes[i] = std::abs(code) <= FLT_MAX ? static_cast<int32_t>(kept) : 0;
    }
}

}  // namespace

extern "C" void zlab_quantise(void* codes, float* scales, const void* values, int32_t dtype, int32_t bits,
                              int64_t numel, int64_t threads) {
    const float top = bits == 8 ? 127.0f : 7.0f;
    in_blocks(numel, threads, [&](int64_t start, int64_t n) {
        alignas(64) float buffer[BLOCK];
        alignas(64) int32_t whole[BLOCK + 1] = {};  // one more: an odd end has an empty half byte
        const float* wide = widened(at(values, dtype, start), dtype, buffer, n);
        const float scale = largest(wide, n) / top;
        scales[start / BLOCK] = scale;
        integers(wide, scale, top, whole, n);
        if (bits == 8) {
            int8_t* to = static_cast<int8_t*>(codes) + start;
            for (int64_t i = 0; i < n; ++i) to[i] = static_cast<int8_t>(whole[i]);
        } else {
            whole[n] = 0;
            uint8_t* to = static_cast<uint8_t*>(codes) + start / 2;
            for (int64_t i = 0; i < (n + 1) / 2; ++i)
                to[i] = static_cast<uint8_t>((whole[2 * i] & 15) | (whole[2 * i + 1] & 15) << 4);
        }
    });
}

extern "C" void zlab_dequantise(void* target, int32_t dtype, const void* codes, const float* scales, int32_t bits,
                                int64_t numel, int64_t threads) {
    in_blocks(numel, threads, [&](int64_t start, int64_t n) {
        alignas(64) float wide[BLOCK];
        const float scale = scales[start / BLOCK];
        if (bits == 8) {
            const int8_t* from = static_cast<const int8_t*>(codes) + start;
            for (int64_t i = 0; i < n; ++i) wide[i] = static_cast<float>(from[i]) * scale;
        } else {
            const uint8_t* from = static_cast<const uint8_t*>(codes) + start / 2;
            for (int64_t i = 0; i < n; ++i) {
                const int32_t half = i % 2 ? from[i / 2] >> 4 : from[i / 2] & 15;
                wide[i] = static_cast<float>((half ^ 8) - 8) * scale;
            }
        }
        rounded(wide, at(target, dtype, start), dtype, n);
    });
}
