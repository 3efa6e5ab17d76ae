// What the updates share: how a master is read and written, the gradient's scale, Adam's arithmetic.

#pragma once

#include "common.h"

// One master: its weights as fp32, and where they go when they have changed.
struct Master {
    void* master;
    int32_t dtype;
    void* out;  // or null
    int32_t out_dtype;
    bool streams;

    float* open(int64_t start, float* buffer, int64_t numel) const {
        void* from = at(master, dtype, start);
        return const_cast<float*>(widened(from, dtype, buffer, numel));
    }

    void close(float* weights, int64_t start, int64_t numel) const {
        if (dtype != FP32) {
            void* to = at(master, dtype, start);
            rounded(weights, to, dtype, numel);
            if (out) widened(to, dtype, weights, numel);  // the second rounding starts from the first
        }
        if (out) write_out(weights, at(out, out_dtype, start), out_dtype, numel, streams);
    }
};

// A state: its values as fp32, and rounded back if it rests in another dtype.
struct State {
    void* values;
    int32_t dtype;

    float* open(int64_t start, float* buffer, int64_t numel) const {
        return const_cast<float*>(widened(at(values, dtype, start), dtype, buffer, numel));
    }

    void close(const float* wide, int64_t start, int64_t numel) const {
        if (dtype != FP32) rounded(wide, at(values, dtype, start), dtype, numel);
    }
};

struct AdamNumbers {
    float decay, l2, weight1, beta2, weight2, correction, eps, minus_step_size;
};

// torch's lerp changes its formula at a weight of one half.
template <bool FROM_END>
inline float lerp(float start, float end, float weight) {
    return FROM_END ? end - (end - start) * (1.0f - weight) : start + (end - start) * weight;
}

template <bool FROM_END>
inline void moments(float grad, float& first, float& second, const AdamNumbers& c) {
    first = lerp<FROM_END>(first, grad, c.weight1);
    second = second * c.beta2 + grad * c.weight2 * grad;
}

template <bool L2, bool FROM_END>
void adam_block(float* __restrict weights, const float* __restrict grads, float* __restrict firsts,
                float* __restrict seconds, float scale, const AdamNumbers c, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
        const float grad = grads[i] * scale;
        moments<FROM_END>(L2 ? grad + weights[i] * c.l2 : grad, firsts[i], seconds[i], c);
        const float weight = L2 ? weights[i] : weights[i] * c.decay;
        weights[i] = weight + firsts[i] * c.minus_step_size / (std::sqrt(seconds[i]) / c.correction + c.eps);
    }
}

using AdamBlock = void (*)(float*, const float*, float*, float*, float, AdamNumbers, int64_t);

inline AdamBlock adam_block_for(const AdamNumbers& c) {
    if (c.weight1 < 0.5f) return c.l2 != 0 ? adam_block<true, false> : adam_block<false, false>;
    return c.l2 != 0 ? adam_block<true, true> : adam_block<false, true>;
}
