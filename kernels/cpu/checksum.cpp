// A checksum of bytes by the processor's own CRC-32C instruction.
//
// [Note: three lanes] The instruction takes 8 bytes a cycle and gives its result three cycles later, so one chain of it
// runs at a third of its speed. The first three thirds of the bytes, in whole words, are summed side by side; the result
// is the CRC-32C of their three sums (4 bytes each, little-endian) followed by the up to 23 bytes that are left. A flipped
// bit changes its lane's sum, and that is a burst of at most 32 bits in what is summed last: it is always found.

#include "common.h"

#if defined(__SSE4_2__)
#define HAS_CRC 1
static inline uint64_t crc_word(uint64_t crc, uint64_t word) { return _mm_crc32_u64(crc, word); }
static inline uint64_t crc_byte(uint64_t crc, uint8_t byte) { return _mm_crc32_u8(static_cast<uint32_t>(crc), byte); }
#elif defined(__ARM_FEATURE_CRC32) && defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include <arm_acle.h>
#define HAS_CRC 1
static inline uint64_t crc_word(uint64_t crc, uint64_t word) { return __crc32cd(static_cast<uint32_t>(crc), word); }
static inline uint64_t crc_byte(uint64_t crc, uint8_t byte) { return __crc32cb(static_cast<uint32_t>(crc), byte); }
#else
#define HAS_CRC 0
static inline uint64_t crc_word(uint64_t, uint64_t) { return 0; }
static inline uint64_t crc_byte(uint64_t, uint8_t) { return 0; }
#endif

// Whether zlab_checksum may be called on this processor.
extern "C" int32_t zlab_has_checksum() { return HAS_CRC; }

extern "C" uint32_t zlab_checksum(const void* values, int64_t bytes) {
    constexpr uint32_t ONES = 0xFFFFFFFF;  // where a CRC-32C begins, and what its end is inverted by
    const auto* first = static_cast<const uint8_t*>(values);
    const int64_t lane = bytes / 24 * 8;
    uint64_t sums[3] = {ONES, ONES, ONES};
    for (int64_t i = 0; i < lane; i += 8)
        for (int k = 0; k < 3; ++k) {
            uint64_t word;
            std::memcpy(&word, first + k * lane + i, 8);
            sums[k] = crc_word(sums[k], word);
        }
    uint64_t crc = ONES;
    for (const uint64_t sum : sums)
        for (int shift = 0; shift < 32; shift += 8) crc = crc_byte(crc, static_cast<uint8_t>((sum ^ ONES) >> shift));
    for (int64_t i = 3 * lane; i < bytes; ++i) crc = crc_byte(crc, first[i]);
    return static_cast<uint32_t>(crc) ^ ONES;
}
