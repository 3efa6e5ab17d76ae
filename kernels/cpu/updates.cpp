// The element-wise updates of the optimizers: one pass over memory each. What they compute is said in reference.py.

#include "update.h"

namespace {

template <bool FROM_END>
void moments_block(const float* __restrict grads, float* __restrict firsts, float* __restrict seconds,
                   float scale, const AdamNumbers c, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) moments<FROM_END>(grads[i] * scale, firsts[i], seconds[i], c);
}

}  // namespace

extern "C" void zlab_adamw(void* master, int32_t master_dtype, const void* grad, int32_t grad_dtype, void* exp_avg,
                           int32_t exp_avg_dtype, void* exp_avg_sq, int32_t exp_avg_sq_dtype, const float* grad_scale,
                           void* out, int32_t out_dtype, int64_t numel, int64_t threads, float decay, float l2,
                           float weight1, float beta2, float weight2, float correction, float eps,
                           float minus_step_size) {
    const AdamNumbers numbers{decay, l2, weight1, beta2, weight2, correction, eps, minus_step_size};
    const Master target{master, master_dtype, out, out_dtype, numel >= STREAM_NUMEL};
    const AdamBlock block = adam_block_for(numbers);
    const State first{exp_avg, exp_avg_dtype}, second{exp_avg_sq, exp_avg_sq_dtype};
    in_blocks<STEP>(numel, threads, [&](int64_t start, int64_t n) {
        alignas(64) float wide_weights[BLOCK], wide_grads[BLOCK], wide_first[BLOCK], wide_second[BLOCK];
        const float* grads = widened(at(grad, grad_dtype, start), grad_dtype, wide_grads, n);
        float* weights = target.open(start, wide_weights, n);
        float *firsts = first.open(start, wide_first, n), *seconds = second.open(start, wide_second, n);
        block(weights, grads, firsts, seconds, *grad_scale, numbers, n);
        first.close(firsts, start, n);
        second.close(seconds, start, n);
        target.close(weights, start, n);
    });
}

extern "C" void zlab_lamb_moments(const void* grad, int32_t grad_dtype, float* exp_avg, float* exp_avg_sq,
                                  const float* grad_scale, int64_t numel, int64_t threads, float weight1, float beta2,
                                  float weight2) {
    const AdamNumbers numbers{1, 0, weight1, beta2, weight2, 1, 0, 0};
    const auto block = weight1 < 0.5f ? moments_block<false> : moments_block<true>;
    in_blocks<STEP>(numel, threads, [&](int64_t start, int64_t n) {
        alignas(64) float wide_grads[BLOCK];
        const float* grads = widened(at(grad, grad_dtype, start), grad_dtype, wide_grads, n);
        block(grads, exp_avg + start, exp_avg_sq + start, *grad_scale, numbers, n);
    });
}

namespace {

enum Momentum { NONE, FIRST, LATER };

struct SgdNumbers {
    float l2, momentum, weight, minus_lr;
};

template <Momentum MOMENTUM, bool NESTEROV>
void sgd_block(float* __restrict weights, const float* __restrict grads, float* __restrict buffers, float scale,
               const SgdNumbers c, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
        const float grad = grads[i] * scale;
        float step = c.l2 != 0 ? grad + weights[i] * c.l2 : grad;
        if (MOMENTUM != NONE) {
            const float buffer = MOMENTUM == FIRST ? step : buffers[i] * c.momentum + step * c.weight;
            buffers[i] = buffer;
            step = NESTEROV ? step + buffer * c.momentum : buffer;
        }
        weights[i] += step * c.minus_lr;
    }
}

struct LionNumbers {
    float decay, beta1, weight1, beta2, weight2, minus_lr;
};

void lion_block(float* __restrict weights, const float* __restrict grads, float* __restrict firsts,
                float scale, const LionNumbers c, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
        const float grad = grads[i] * scale;
        const float aim = firsts[i] * c.beta1 + grad * c.weight1;
        const float sign = static_cast<float>(aim > 0) - static_cast<float>(aim < 0);
        weights[i] = weights[i] * c.decay + sign * c.minus_lr;
        firsts[i] = firsts[i] * c.beta2 + grad * c.weight2;
    }
}

}  // namespace

// `momentum_buffer` is null without momentum; `kind` is 0 then, 1 in the first step, 2 later.
extern "C" void zlab_sgd(void* master, int32_t master_dtype, const void* grad, int32_t grad_dtype,
                         void* momentum_buffer, int32_t momentum_buffer_dtype, const float* grad_scale, void* out,
                         int32_t out_dtype, int64_t numel, int64_t threads, int32_t kind, int32_t nesterov, float l2,
                         float momentum, float weight, float minus_lr) {
    const SgdNumbers numbers{l2, momentum, weight, minus_lr};
    const Master target{master, master_dtype, out, out_dtype, numel >= STREAM_NUMEL};
    const auto block = kind == NONE    ? sgd_block<NONE, false>
                       : kind == FIRST ? (nesterov ? sgd_block<FIRST, true> : sgd_block<FIRST, false>)
                                       : (nesterov ? sgd_block<LATER, true> : sgd_block<LATER, false>);
    const State state{momentum_buffer, momentum_buffer_dtype};
    in_blocks<STEP>(numel, threads, [&](int64_t start, int64_t n) {
        alignas(64) float wide_weights[BLOCK], wide_grads[BLOCK], wide_buffers[BLOCK];
        const float* grads = widened(at(grad, grad_dtype, start), grad_dtype, wide_grads, n);
        float* weights = target.open(start, wide_weights, n);
        float* buffers = momentum_buffer ? state.open(start, wide_buffers, n) : nullptr;
        block(weights, grads, buffers, *grad_scale, numbers, n);
        if (momentum_buffer) state.close(buffers, start, n);
        target.close(weights, start, n);
    });
}

extern "C" void zlab_lion(void* master, int32_t master_dtype, const void* grad, int32_t grad_dtype, void* exp_avg,
                          int32_t exp_avg_dtype, const float* grad_scale, void* out, int32_t out_dtype, int64_t numel,
                          int64_t threads, float decay, float beta1, float weight1, float beta2, float weight2,
                          float minus_lr) {
    const LionNumbers numbers{decay, beta1, weight1, beta2, weight2, minus_lr};
    const Master target{master, master_dtype, out, out_dtype, numel >= STREAM_NUMEL};
    const State first{exp_avg, exp_avg_dtype};
    in_blocks<STEP>(numel, threads, [&](int64_t start, int64_t n) {
        alignas(64) float wide_weights[BLOCK], wide_grads[BLOCK], wide_first[BLOCK];
        const float* grads = widened(at(grad, grad_dtype, start), grad_dtype, wide_grads, n);
        float* weights = target.open(start, wide_weights, n);
        float* firsts = first.open(start, wide_first, n);
        lion_block(weights, grads, firsts, *grad_scale, numbers, n);
        first.close(firsts, start, n);
        target.close(weights, start, n);
    });
}

// ---- LAMB after its moments ----------------------------------------------------------------------------------------

namespace {

struct LambNumbers {
    float correction1, correction2, eps, decay;
};

void lamb_updates(const float* __restrict weights, const float* __restrict firsts, const float* __restrict seconds,
                  float* __restrict updates, const LambNumbers c, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
        const float root = std::sqrt(seconds[i] / c.correction2);
        updates[i] = firsts[i] / c.correction1 / (root + c.eps) + weights[i] * c.decay;
    }
}

}  // namespace

// `groups` has room for two sums a group; see [Note: order of squares].
extern "C" void zlab_lamb_squares(const void* master, int32_t master_dtype, const float* exp_avg,
                                  const float* exp_avg_sq, double* groups, double* totals, int64_t numel,
                                  int64_t threads, float correction1, float correction2, float eps, float decay) {
    const LambNumbers numbers{correction1, correction2, eps, decay};
    const int64_t count = (numel + GROUP - 1) / GROUP;
    in_threads(numel, threads, GROUP, [&](int64_t start, int64_t stop) {
        for (; start < stop; start += GROUP) {
            Lanes of_weights, of_updates;
            for (int64_t from = start; from < std::min(start + GROUP, stop); from += BLOCK) {
                const int64_t n = std::min(BLOCK, stop - from);
                alignas(64) float wide_weights[BLOCK], updates[BLOCK];
                const float* weights = widened(at(master, master_dtype, from), master_dtype, wide_weights, n);
                lamb_updates(weights, exp_avg + from, exp_avg_sq + from, updates, numbers, n);
                of_weights.add(weights, n);
                of_updates.add(updates, n);
            }
            groups[start / GROUP] = of_weights.folded();
            groups[count + start / GROUP] = of_updates.folded();
        }
    });
    totals[0] = folded(groups, count);
    totals[1] = folded(groups + count, count);
}

extern "C" void zlab_lamb(void* master, int32_t master_dtype, const float* exp_avg, const float* exp_avg_sq,
                          const float* ratio, void* out, int32_t out_dtype, int64_t numel, int64_t threads,
                          float correction1, float correction2, float eps, float decay, float minus_lr) {
    const LambNumbers numbers{correction1, correction2, eps, decay};
    const Master target{master, master_dtype, out, out_dtype, numel >= STREAM_NUMEL};
    in_blocks<STEP>(numel, threads, [&](int64_t start, int64_t n) {
        alignas(64) float wide_weights[BLOCK], updates[BLOCK];
        float* weights = target.open(start, wide_weights, n);
        lamb_updates(weights, exp_avg + start, exp_avg_sq + start, updates, numbers, n);
        for (int64_t i = 0; i < n; ++i) weights[i] += updates[i] * *ratio * minus_lr;
        target.close(weights, start, n);
    });
}
