// What reads and writes memory with next to no arithmetic: accumulate, cast, sum of squares.

#include "common.h"

extern "C" void zlab_accumulate(void* target, int32_t target_dtype, const void* values, int32_t values_dtype,
                                int64_t numel, int64_t threads, float scale) {
    in_blocks(numel, threads, [&](int64_t start, int64_t n) {
        alignas(64) float wide_sums[BLOCK], wide_values[BLOCK];
        void* to = at(target, target_dtype, start);
        float* sums = const_cast<float*>(widened(to, target_dtype, wide_sums, n));
        const float* wide = widened(at(values, values_dtype, start), values_dtype, wide_values, n);
        for (int64_t i = 0; i < n; ++i) sums[i] += wide[i] * scale;
        if (target_dtype != FP32) rounded(sums, to, target_dtype, n);
    });
}

extern "C" void zlab_cast_copy(void* target, int32_t target_dtype, const void* values, int32_t values_dtype,
                               int64_t numel, int64_t threads) {
    const bool streams = numel >= STREAM_NUMEL;
    in_blocks(numel, threads, [&](int64_t start, int64_t n) {
        alignas(64) float wide[BLOCK];
        const void* from = at(values, values_dtype, start);
        void* to = at(target, target_dtype, start);
        if (target_dtype != values_dtype)
            write_out(widened(from, values_dtype, wide, n), to, target_dtype, n, streams);
        else if (streams)
            stream(from, to, n * size_of(target_dtype));
        else
            std::memcpy(to, from, n * size_of(target_dtype));
    });
}

// `groups` has room for one sum a group; see [Note: order of squares].
extern "C" void zlab_sum_of_squares(const void* values, int32_t dtype, double* groups, double* total, int64_t numel,
                                    int64_t threads) {
    in_threads(numel, threads, GROUP, [&](int64_t start, int64_t stop) {
        for (; start < stop; start += GROUP) {
            Lanes lanes;
            for (int64_t from = start; from < std::min(start + GROUP, stop); from += BLOCK) {
                const int64_t n = std::min(BLOCK, stop - from);
                alignas(64) float wide[BLOCK];
                lanes.add(widened(at(values, dtype, from), dtype, wide, n), n);
            }
            groups[start / GROUP] = lanes.folded();
        }
    });
    *total = folded(groups, (numel + GROUP - 1) / GROUP);
}
