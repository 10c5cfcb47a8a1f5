// Up to 16 rows x 32 channels at a time by the matrix unit of some Intel processors (AMX): weights of 8 or 16 bits lie in memory
// just as its tiles want them, so that 16 rows cost little more than one.
//
// A product of tiles takes as many cycles as the left one has rows, and each row is summed alone and in order: numbers of 8 bits
// give the same whole sums as any other way, and rows in bf16 do not depend on how many there are, as long as all go this way.

#pragma once

#include <cstdint>
#include <cstring>

#include "vector.h"

#if defined(__linux__) && defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t tile_bytes = 64;  // of a row of a tile: the inputs that one product takes
constexpr int64_t tile_rows = 16;

// So many rows, up to whole tiles.
inline int64_t whole_tiles(int64_t rows) { return (rows + tile_rows - 1) / tile_rows * tile_rows; }

#if defined(TILES)

// The system keeps the tiles' registers for those who ask for them (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
inline bool granted() {
  static const bool yes = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return yes;
}

bool tiles_wanted = true;

// gcc does not know what loads of tiles read: what was written before must be in memory by then.
inline void written() { asm volatile("" ::: "memory"); }

// The tiles of a thread while this lives: 0 and 1 are for the sums of 16 rows, 2 for these rows, 3 and 4 for weights; 5, 6 and 7 for
// the sums and rows of another group: the last one, where that has fewer rows.
struct Tiles {
  explicit Tiles(int64_t rows) {
    struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    const uint8_t rest = rows % tile_rows;
    for (int tile = 0; tile < 8; ++tile) shape.bytes[tile] = tile_bytes, shape.rows[tile] = tile < 5 || !rest ? tile_rows : rest;
    asm volatile("" ::"r"(&shape) : "memory");
    _tile_loadconfig(&shape);
  }
  ~Tiles() { _tile_release(); }
};

// What is done for each product's inputs, while products run: nothing. What they wait for anyway takes no time of its own.
struct NothingElse {
  ALWAYS_INLINE void operator()() {}
};

// Macros, because numbers of tiles are part of an instruction.
#define PRODUCT(sum, some, weights)                                   \
  if constexpr (sizeof(X) == 1) _tile_dpbusd(sum, some, weights);     \
  else _tile_dpbf16ps(sum, some, weights)
#define PRODUCTS(left, right, some)                   \
  _tile_zero(left);                                   \
  _tile_zero(right);                                  \
  for (int64_t k = 0; k < in; k += tile_bytes) {      \
    _tile_loadd(3, w, 2 * tile_bytes);                \
    _tile_loadd(4, w + tile_bytes, 2 * tile_bytes);   \
    _tile_loadd(some, x + k, in);                     \
    PRODUCT(left, some, 3);                           \
    PRODUCT(right, some, 4);                          \
    w += 2 * tile_rows * tile_bytes;                  \
    meanwhile();                                      \
  }                                                   \
  _tile_stored(left, sums, 2 * tile_bytes);           \
  _tile_stored(right, sums + tile_bytes, 2 * tile_bytes)

// Rows of `in` bytes, one behind the other, times a block of 32 channels: 16 rows if `whole`, else those of the last group.
template <typename X, typename W, typename S, typename F = NothingElse>
ALWAYS_INLINE F products(bool whole, const X* rows, int64_t in, const W* weights, S sum[tile_rows][2], F meanwhile = {}) {
  const char *x = (const char*)rows, *w = (const char*)weights;
  char* sums = (char*)sum;
  written();
  if (whole) {
    PRODUCTS(0, 1, 2);
  } else {
    PRODUCTS(5, 6, 7);
  }
  return meanwhile;
}

// Two groups of 16 rows at once: weights are read once for both, and while a product waits for the one before in its sum, others run. Tiles
// of 16 rows.
template <typename X, typename W, typename S, typename F>
ALWAYS_INLINE F pair_products(const X* rows, const X* others, int64_t in, const W* weights, S sum[2][tile_rows][2], F meanwhile) {
  const char *x = (const char*)rows, *other = (const char*)others, *w = (const char*)weights;
  char* sums = (char*)sum;
  written();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(5);
  _tile_zero(6);
  for (int64_t k = 0; k < in; k += tile_bytes) {
    _tile_loadd(3, w, 2 * tile_bytes);
    _tile_loadd(2, x + k, in);
    PRODUCT(0, 2, 3);
    _tile_loadd(4, w + tile_bytes, 2 * tile_bytes);
    PRODUCT(1, 2, 4);
    _tile_loadd(7, other + k, in);
    PRODUCT(5, 7, 3);
    PRODUCT(6, 7, 4);
    w += 2 * tile_rows * tile_bytes;
    meanwhile();
  }
  _tile_stored(0, sums, 2 * tile_bytes);
  _tile_stored(1, sums + tile_bytes, 2 * tile_bytes);
  sums += 2 * tile_rows * tile_bytes;
  _tile_stored(5, sums, 2 * tile_bytes);
  _tile_stored(6, sums + tile_bytes, 2 * tile_bytes);
  return meanwhile;
}

#undef PRODUCTS
#undef PRODUCT

// Rows of `lanes` pairs against 16 keys, turned: to[r * stride + t] is row r times key t.
#define SCORES(sum, some)                              \
  written();                                           \
  _tile_zero(sum);                                     \
  for (int64_t i = 0; i < lanes; i += tile_rows) {     \
    _tile_loadd(some, q + i, 4 * lanes);               \
    _tile_loadd(3, turned + i * tile_rows, tile_bytes); \
    _tile_dpbf16ps(sum, some, 3);                      \
  }                                                    \
  _tile_stored(sum, to, 4 * stride)

inline void scores(bool whole, const int32_t* q, int64_t lanes, const int32_t* turned, float* to, int64_t stride) {
  if (whole) {
    SCORES(0, 2);
  } else {
    SCORES(5, 7);
  }
}

#undef SCORES

// The tiles of a thread for weights whose sums end with a group of inputs: 0 and 1, or 2 and 3, are for the sums of 16 rows, 4 or 5 for the
// rows, 6 and 7 for weights.
struct GroupTiles {
  explicit GroupTiles(int group) {
    struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int tile = 0; tile < 8; ++tile) {
      shape.bytes[tile] = tile == 4 || tile == 5 ? group : tile_bytes;
      shape.rows[tile] = tile < 6 ? tile_rows : group / 4;
    }
    asm volatile("" ::"r"(&shape) : "memory");
    _tile_loadconfig(&shape);
  }
  ~GroupTiles() { _tile_release(); }
};

#define GROUP_PRODUCTS(left, right, some)          \
  _tile_zero(left);                                \
  _tile_zero(right);                               \
  _tile_loadd(some, x, stride);                    \
  _tile_loadd(6, w, 2 * tile_bytes);               \
  _tile_loadd(7, w + tile_bytes, 2 * tile_bytes);  \
  _tile_dpbssd(left, some, 6);                     \
  _tile_dpbssd(right, some, 7);                    \
  _tile_stored(left, sums, 2 * tile_bytes);        \
  _tile_stored(right, sums + tile_bytes, 2 * tile_bytes)

// 16 rows of signed bytes, `stride` of them apart, times a group of inputs of 32 channels, signed, too. Calls alternate between tiles, so
// that one need not wait for the other.
inline void group_products(bool other, const int8_t* x, int64_t stride, const int8_t* w, i16v sum[tile_rows][2]) {
  char* sums = (char*)sum;
  written();
  if (other) {
    GROUP_PRODUCTS(2, 3, 5);
  } else {
    GROUP_PRODUCTS(0, 1, 4);
  }
}

#undef GROUP_PRODUCTS

#else

inline bool granted() { return false; }
bool tiles_wanted = false;
struct Tiles {
  explicit Tiles(int64_t) {}
};
template <typename X, typename W, typename S, typename... F>
inline void products(bool, const X*, int64_t, const W*, S (*)[2], F...) {}
template <typename X, typename W, typename S, typename F>
inline F pair_products(const X*, const X*, int64_t, const W*, S (*)[tile_rows][2], F meanwhile) {
  return meanwhile;
}
inline void scores(bool, const int32_t*, int64_t, const int32_t*, float*, int64_t) {}

#endif

// Whether rows of so many numbers of 8 or 16 bits can be read in tiles.
inline bool tiles_fit(int64_t in) { return tiles_wanted && in % tile_bytes == 0 && granted(); }

}  // namespace
