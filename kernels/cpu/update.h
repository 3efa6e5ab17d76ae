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

// [Note: roots] torch takes square roots from MKL where it is built with it, and on a processor that is not Intel's MKL
// gives what rsqrtps and two Newton steps make, one unit in the last place off in every fifth element. To have torch's
// bits NEWTON does the same; whoever loads the library finds out which of the two is torch's.
enum Root : int32_t { EXACT = 0, NEWTON = 1 };

#if defined(__AVX__)
inline __m256 newton_root(__m256 value) {
    const __m256 half = _mm256_set1_ps(0.5f), guess = _mm256_rsqrt_ps(value);
    __m256 root = _mm256_mul_ps(value, guess), slope = _mm256_mul_ps(guess, half);
    const __m256 error = _mm256_sub_ps(half, _mm256_mul_ps(root, slope));
    root = _mm256_add_ps(_mm256_mul_ps(root, error), root);
    slope = _mm256_add_ps(_mm256_mul_ps(slope, error), slope);
    root = _mm256_add_ps(root, _mm256_mul_ps(_mm256_sub_ps(value, _mm256_mul_ps(root, root)), slope));
    // Zero, subnormals, infinity and the largest 2048 numbers of all are exact there too.
    const __m256 least = _mm256_set1_ps(float_of(0x00800000)), most = _mm256_set1_ps(float_of(0x7F7FF800));
    const __m256 plain = _mm256_and_ps(_mm256_cmp_ps(value, least, _CMP_GE_OQ), _mm256_cmp_ps(value, most, _CMP_LT_OQ));
    return _mm256_movemask_ps(plain) == 0xFF ? root : _mm256_blendv_ps(_mm256_sqrt_ps(value), root, plain);
}
#endif

#if defined(__AVX512F__) && defined(__AVX512DQ__)
inline __m512 newton_root(__m512 value) {
    const __m256 low = _mm512_castps512_ps256(value), high = _mm512_extractf32x8_ps(value, 1);
    const __m512 guess = _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_rsqrt_ps(low)), _mm256_rsqrt_ps(high), 1);
    const __m512 half = _mm512_set1_ps(0.5f);
    __m512 root = _mm512_mul_ps(value, guess), slope = _mm512_mul_ps(guess, half);
    const __m512 error = _mm512_sub_ps(half, _mm512_mul_ps(root, slope));
    root = _mm512_add_ps(_mm512_mul_ps(root, error), root);
    slope = _mm512_add_ps(_mm512_mul_ps(slope, error), slope);
    root = _mm512_add_ps(root, _mm512_mul_ps(_mm512_sub_ps(value, _mm512_mul_ps(root, root)), slope));
    const __m512 least = _mm512_set1_ps(float_of(0x00800000)), most = _mm512_set1_ps(float_of(0x7F7FF800));
    const __mmask16 plain = _mm512_cmp_ps_mask(value, least, _CMP_GE_OQ) & _mm512_cmp_ps_mask(value, most, _CMP_LT_OQ);
    return plain == 0xFFFF ? root : _mm512_mask_blend_ps(plain, _mm512_sqrt_ps(value), root);
}
#endif

inline void roots(const float* __restrict values, float* __restrict to, int64_t numel, int32_t kind) {
    int64_t i = 0;
#if defined(__AVX__)
    if (kind == NEWTON) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
        for (; i + 16 <= numel; i += 16) _mm512_storeu_ps(to + i, newton_root(_mm512_loadu_ps(values + i)));
#endif
        for (; i + 8 <= numel; i += 8) _mm256_storeu_ps(to + i, newton_root(_mm256_loadu_ps(values + i)));
        alignas(32) float rest[8] = {};
        std::memcpy(rest, values + i, (numel - i) * 4);
        _mm256_store_ps(rest, newton_root(_mm256_load_ps(rest)));
        std::memcpy(to + i, rest, (numel - i) * 4);
        return;
    }
#endif
    (void)kind;
    for (; i < numel; ++i) to[i] = std::sqrt(values[i]);
}

struct AdamNumbers {
    float decay, l2, weight1, beta2, weight2, correction, eps, minus_step_size;
    int32_t root;
};

// torch's lerp changes its formula at a weight of one half.
template <bool FROM_END>
inline float lerp(float start, float end, float weight) {
    return FROM_END ? std::fma(weight - 1.0f, end - start, end) : std::fma(weight, end - start, start);
}

template <bool FROM_END>
inline void moments(float grad, float& first, float& second, const AdamNumbers& c) {
    first = lerp<FROM_END>(first, grad, c.weight1);
    second = std::fma(c.weight2 * grad, grad, second * c.beta2);
}

template <bool L2, bool FROM_END>
void adam_block(float* __restrict weights, const float* __restrict grads, float* __restrict firsts,
                float* __restrict seconds, float scale, const AdamNumbers c, int64_t numel) {
    alignas(64) float root[BLOCK];
    for (int64_t i = 0; i < numel; ++i) {
        const float grad = grads[i] * scale;
        moments<FROM_END>(L2 ? std::fma(c.l2, weights[i], grad) : grad, firsts[i], seconds[i], c);
    }
    roots(seconds, root, numel, c.root);
    for (int64_t i = 0; i < numel; ++i) {
        const float weight = L2 ? weights[i] : weights[i] * c.decay;
        weights[i] = weight + c.minus_step_size * firsts[i] / (root[i] / c.correction + c.eps);
    }
}

using AdamBlock = void (*)(float*, const float*, float*, float*, float, AdamNumbers, int64_t);

inline AdamBlock adam_block_for(const AdamNumbers& c) {
    if (c.weight1 < 0.5f) return c.l2 != 0 ? adam_block<true, false> : adam_block<false, false>;
    return c.l2 != 0 ? adam_block<true, true> : adam_block<false, true>;
}
