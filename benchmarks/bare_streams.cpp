// The limit that kernels.py measures against: a loop over an update's streams with next to no arithmetic.
// fp32: reads p, g, m, v and writes p, m, v. mixed: reads bf16 g and p, m, v; writes p, m, v and bf16 out.

#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

template <class Body>
static void in_threads(int64_t numel, int64_t threads, Body body) {
    const int64_t piece = (numel / threads + 63) / 64 * 64;
    std::vector<std::thread> others;
    for (int64_t i = 1; i < threads; ++i)
        others.emplace_back([=] { body(i * piece, i + 1 == threads ? numel : (i + 1) * piece); });
    body(0, threads == 1 ? numel : piece);
    for (std::thread& other : others) other.join();
}

extern "C" void bare_fp32(float* p, const float* g, float* m, float* v, int64_t numel, int64_t threads) {
    in_threads(numel, threads, [=](int64_t start, int64_t stop) {
        float *__restrict P = p, *__restrict M = m, *__restrict V = v;
        const float* __restrict G = g;
        for (int64_t i = start; i < stop; ++i) {
            M[i] += G[i];
            V[i] += G[i];
            P[i] += G[i];
        }
    });
}

extern "C" void bare_mixed(float* p, const uint16_t* g, float* m, float* v, uint16_t* out, int64_t numel,
                           int64_t threads) {
    in_threads(numel, threads, [=](int64_t start, int64_t stop) {
        float *__restrict P = p, *__restrict M = m, *__restrict V = v;
        const uint16_t* __restrict G = g;
        uint16_t* __restrict O = out;
        for (int64_t i = start; i < stop; ++i) {
            uint32_t bits = static_cast<uint32_t>(G[i]) << 16;
            float grad;
            std::memcpy(&grad, &bits, 4);
            M[i] += grad;
            V[i] += grad;
            const float weight = P[i] + grad;
            P[i] = weight;
            std::memcpy(&bits, &weight, 4);
            O[i] = static_cast<uint16_t>(bits >> 16);
        }
    });
}
