// What every operation here is made of: dtypes, blocks that stay in the first cache, threads.
//
// [Note: blocks] An operation walks its tensors in blocks of BLOCK elements. Operands that are no fp32 are widened into
// a buffer of fp32 first and rounded out of one last, so each loop between is plain fp32 and is compiled once. Small
// blocks keep the loads of the next one in flight behind the arithmetic of this one, which lets the processor's own
// prefetching work; prefetch instructions made every update slower (AMD EPYC; 128 to 2048 elements were tried).
//
// [Note: threads] Threads are made for a call and joined in it. A pool would cost less a call (a thread takes about
// 20 us to make) and would not survive fork(): libgomp's hangs in the child. Nothing here outlives a call.
//
// [Note: bits] Each operation of reference.py is one here, in its order, and rounds once. The sources are compiled
// without contraction, so that no compiler fuses a multiplication with an addition: AVX2, AVX-512, NEON and no vector
// instructions at all give the same bits.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

constexpr int64_t BLOCK = 256;  // also of the 8-bit format and of sums of squares
constexpr int64_t STEP = 128;   // of the updates
constexpr int64_t GRAIN = 64 * 1024;        // elements below which another thread costs more than it saves
constexpr int64_t STREAM_NUMEL = 1 << 20;   // from here on what is only written goes past the caches

enum Dtype : int32_t { FP32 = 0, BF16 = 1, FP16 = 2 };

inline int64_t size_of(int32_t dtype) { return dtype == FP32 ? 4 : 2; }

template <class T>
inline T* at(T* base, int32_t dtype, int64_t index) {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return static_cast<T*>(static_cast<Byte*>(base) + index * size_of(dtype));
}

// ---- bits ----------------------------------------------------------------------------------------------------------

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

// To nearest, ties to even; a NaN stays one.
inline uint16_t bf16_of(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>(value != value ? 0x7FC0 : rounded);
}

#if defined(__F16C__)
inline void fp16_to_fp32(const uint16_t* from, float* to, int64_t numel) {
    int64_t i = 0;
    for (; i + 8 <= numel; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    for (; i < numel; ++i) to[i] = _cvtsh_ss(from[i]);
}

inline void fp32_to_fp16(const float* from, uint16_t* to, int64_t numel) {
    int64_t i = 0;
    for (; i + 8 <= numel; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < numel; ++i) to[i] = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
}
#elif defined(__aarch64__)
inline void fp16_to_fp32(const uint16_t* from, float* to, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
        __fp16 half;
        std::memcpy(&half, from + i, 2);
        to[i] = half;
    }
}

inline void fp32_to_fp16(const float* from, uint16_t* to, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
        const __fp16 half = from[i];
        std::memcpy(to + i, &half, 2);
    }
}
#else
// Without an instruction for it. 2^112 takes the exponent from fp16's bias of 15 to fp32's of 127, subnormals included.
inline void fp16_to_fp32(const uint16_t* from, float* to, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
        const uint32_t magnitude = from[i] & 0x7FFF, sign = static_cast<uint32_t>(from[i] & 0x8000) << 16;
        const float rebiased = float_of(magnitude << 13) * 0x1p112f;
        to[i] = float_of((magnitude >= 0x7C00 ? 0x7F800000 | magnitude << 13 : bits_of(rebiased)) | sign);
    }
}

// To nearest, ties to even. Subnormal numbers of fp16 are multiples of 2^-24, which is the last place of 0.5.
inline void fp32_to_fp16(const float* from, uint16_t* to, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
        const uint32_t bits = bits_of(from[i]), magnitude = bits & 0x7FFFFFFF;
        uint32_t half;
        if (magnitude > 0x7F800000) {
            half = 0x7E00;
        } else if (magnitude >= 0x477FF000) {  // from halfway between the largest number and the next
            half = 0x7C00;
        } else if (magnitude < 0x38800000) {  // below 2^-14
            half = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
        } else {
            half = (magnitude - (112u << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
        }
        to[i] = static_cast<uint16_t>(half | bits >> 31 << 15);
    }
}
#endif

inline void bf16_to_fp32(const uint16_t* __restrict from, float* __restrict to, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) to[i] = float_of(static_cast<uint32_t>(from[i]) << 16);
}

inline void fp32_to_bf16(const float* __restrict from, uint16_t* __restrict to, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) to[i] = bf16_of(from[i]);
}

// ---- blocks --------------------------------------------------------------------------------------------------------

// The operand as fp32: itself, or `buffer` filled with its values.
inline const float* widened(const void* from, int32_t dtype, float* buffer, int64_t numel) {
    if (dtype == FP32) return static_cast<const float*>(from);
    if (dtype == BF16)
        bf16_to_fp32(static_cast<const uint16_t*>(from), buffer, numel);
    else
        fp16_to_fp32(static_cast<const uint16_t*>(from), buffer, numel);
    return buffer;
}

inline void rounded(const float* from, void* to, int32_t dtype, int64_t numel) {
    if (dtype == FP32)
        std::memcpy(to, from, numel * 4);
    else if (dtype == BF16)
        fp32_to_bf16(from, static_cast<uint16_t*>(to), numel);
    else
        fp32_to_fp16(from, static_cast<uint16_t*>(to), numel);
}

// Past the caches: a line that is only written need not be read first, and pushes nothing out.
inline void stream(const void* from, void* to, int64_t bytes) {
#if defined(__AVX__)
    const char* source = static_cast<const char*>(from);
    char* target = static_cast<char*>(to);
    const int64_t head = std::min<int64_t>(bytes, -reinterpret_cast<intptr_t>(target) & 31);
    std::memcpy(target, source, head);
    int64_t i = head;
    for (; i + 32 <= bytes; i += 32)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(target + i),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i)));
    std::memcpy(target + i, source + i, bytes - i);
#else
    std::memcpy(to, from, bytes);
#endif
}

inline void end_of_streams() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// Rounds `from` into elements of `to`, with `streams` past the caches.
inline void write_out(const float* from, void* to, int32_t dtype, int64_t numel, bool streams) {
    if (!streams) {
        rounded(from, to, dtype, numel);
    } else if (dtype == FP32) {
        stream(from, to, numel * 4);
    } else {
        alignas(64) uint16_t buffer[BLOCK];
        rounded(from, buffer, dtype, numel);
        stream(buffer, to, numel * 2);
    }
}

// The largest magnitude; a NaN where there is one.
inline float largest(const float* values, int64_t numel) {
    uint32_t most = 0;  // magnitudes have the order of their bits, and NaNs come after infinity
    for (int64_t i = 0; i < numel; ++i) most = std::max(most, bits_of(values[i]) & 0x7FFFFFFF);
    return float_of(most);
}

// ---- squares -------------------------------------------------------------------------------------------------------

// [Note: order of squares] Lane k of a group adds the squares of its elements k, k + BLOCK, k + 2 BLOCK, ... in fp64;
// the lanes are then folded in halves. So neither threads nor vector widths move a bit.
constexpr int64_t GROUP = 64 * BLOCK;

struct Lanes {
    alignas(64) double sums[BLOCK] = {};

    void add(const float* __restrict values, int64_t numel) {
        for (int64_t i = 0; i < numel; ++i) sums[i] += static_cast<double>(values[i]) * values[i];
    }

    double folded() {
        for (int64_t half = BLOCK / 2; half; half /= 2)
            for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
        return sums[0];
    }
};

// The sums of all groups, folded in halves too; they are overwritten.
inline double folded(double* sums, int64_t count) {
    int64_t half = 1;
    while (half < count) half *= 2;
    while (half /= 2)
        for (int64_t i = 0; i + half < count && i < half; ++i) sums[i] += sums[i + half];
    return count ? sums[0] : 0;
}

// ---- threads -------------------------------------------------------------------------------------------------------

// `body(start, stop)` on pieces of [0, numel) cut at multiples of `unit`, one a thread; see [Note: threads].
template <class Body>
void in_threads(int64_t numel, int64_t threads, int64_t unit, const Body& body) {
    const int64_t wanted = std::clamp<int64_t>(numel / GRAIN, 1, std::max<int64_t>(threads, 1));
    const int64_t piece = ((numel + wanted - 1) / wanted + unit - 1) / unit * unit;
    std::vector<std::thread> others;
    int64_t start = piece;
    for (; start < numel; start += piece) {
        const int64_t from = start, to = std::min(numel, start + piece);
        try {
            others.emplace_back([&body, from, to] { body(from, to); });
        } catch (const std::system_error&) {  // no more threads to be had: the rest is done by this one
            break;
        }
    }
    body(0, std::min(numel, piece));
    if (start < numel) body(start, numel);
    for (std::thread& other : others) other.join();
}

// `body(start, numel)` on every SIZE elements of [0, numel).
template <int64_t SIZE = BLOCK, class Body>
void in_blocks(int64_t numel, int64_t threads, const Body& body) {
    in_threads(numel, threads, BLOCK, [&](int64_t start, int64_t stop) {
        for (; start < stop; start += SIZE) body(start, std::min(SIZE, stop - start));
        end_of_streams();
    });
}
