// Products of rows of activations with a packed matrix. Each element of a result is one chain of additions over the inner
// dimension, in order, whatever else is computed beside it: a row's result does not depend on its neighbours.
#pragma once
#include <algorithm>
#include <type_traits>

#include "simd.h"
#include "team.h"

namespace headrace {

constexpr int kPanelTiles = 3;  // three tiles of lanes by eight rows of sums fill the registers
constexpr int kPanelRows = 8;
constexpr int kPanelColumns = kPanelTiles * kLanes;
constexpr int kTaskRows = 128;
constexpr int kLine = 64;         // bytes of a cache line
constexpr int kStreamAhead = 4096;  // bytes: beyond the page, where the hardware's own prefetching stops

// A matrix [outputs, inputs] in panels of columns: [panel][step][tile][lane] dwords, zeros beyond its edges.
struct Matrix {
  const void* panels;
  const float* bias;  // [outputs, padded], or null
  int outputs;
  int inputs;
};

inline int panels_of(int outputs) { return (outputs + kPanelColumns - 1) / kPanelColumns; }

// `finish(sums)` gets ROWS x TILES vectors: `rows`, `stride` elements apart, times a panel `steps` dwords deep. Meanwhile
// LINES cache lines from `ahead` on are fetched in each step.
template <class T, int ROWS, int TILES, int LINES, class Finish>
inline __attribute__((always_inline)) void multiply(const T* rows, size_t stride, const T* panel, int steps,
                                                    const char* ahead, Finish&& finish) {
  __m512 sums[ROWS][TILES];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int t = 0; t < TILES; t++) sums[r][t] = _mm512_setzero_ps();
  for (int step = 0; step < steps; step++) {
    __m512i weights[TILES];
#pragma GCC unroll 4
    for (int t = 0; t < TILES; t++)
      weights[t] = _mm512_loadu_si512(panel + (static_cast<size_t>(step) * TILES + t) * kLanes * kStep<T>);
#pragma GCC unroll 4
    for (int line = 0; line < LINES; line++)
      _mm_prefetch(ahead + (static_cast<size_t>(step) * LINES + line) * kLine, LINES == 1 ? _MM_HINT_T1 : _MM_HINT_T0);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      int dword;
      std::memcpy(&dword, rows + r * stride + step * kStep<T>, sizeof dword);
      const __m512i x = _mm512_set1_epi32(dword);
#pragma GCC unroll 4
      for (int t = 0; t < TILES; t++) sums[r][t] = accumulate<T>(sums[r][t], x, weights[t]);
    }
  }
  finish(sums);
}

// Calls `tile(number, first, std::integral_constant<int, n>)` for runs of n of the `rows` rows, of as equal sizes as can be.
template <int LIMIT, class Tile>
inline void in_tiles(int rows, Tile&& tile) {
  const int tiles = (rows + LIMIT - 1) / LIMIT;
  for (int i = 0; i < tiles; i++) {
    const int first = rows * i / tiles;
    switch (rows * (i + 1) / tiles - first) {
#define HEADRACE_ROWS(n)                                                              \
  case n:                                                                             \
    if constexpr (n <= LIMIT) tile(i, first, std::integral_constant<int, n>{});       \
    break;
      HEADRACE_ROWS(1)
      HEADRACE_ROWS(2)
      HEADRACE_ROWS(3)
      HEADRACE_ROWS(4)
      HEADRACE_ROWS(5)
      HEADRACE_ROWS(6)
      HEADRACE_ROWS(7)
      HEADRACE_ROWS(8)
#undef HEADRACE_ROWS
    }
  }
}

// `count` rows times one panel of `matrix`. `finish(row, n, sums)` gets n rows of kPanelTiles vectors of sums each, from
// row `row` on. The weights come from memory once: the first tile of rows waits for them and looks ahead in the stream, the
// others fetch the panel that this thread computes next, `ahead` panels on.
template <class T, class Finish>
inline void multiply_panel(const T* rows, size_t stride, int count, const Matrix& matrix, int panel, int ahead,
                           Finish&& finish) {
  const int steps = steps_of<T>(matrix.inputs);
  const size_t bytes = static_cast<size_t>(steps) * kPanelColumns * sizeof(int);
  const char* here = static_cast<const char*>(matrix.panels) + panel * bytes;
  const T* weights = reinterpret_cast<const T*>(here);
  in_tiles<kPanelRows>(count, [&](int number, int first, auto size) {
    constexpr int kRows = decltype(size)::value;
    const T* begin = rows + first * stride;
    const auto done = [&](auto& sums) { finish(first, size, sums); };
    if (number == 0)
      multiply<T, kRows, kPanelTiles, kPanelTiles>(begin, stride, weights, steps, here + kStreamAhead, done);
    else if (number <= kPanelTiles)
      multiply<T, kRows, kPanelTiles, 1>(begin, stride, weights, steps,
                                         here + ahead * bytes + (number - 1) * steps * kLine, done);
    else
      multiply<T, kRows, kPanelTiles, 0>(begin, stride, weights, steps, nullptr, done);
  });
}

// All of `rows` times `matrix`, shared out over the team's members: `finish(row, n, column, sums)`.
template <class T, class Finish>
inline void product(Member& member, const T* rows, size_t stride, int count, const Matrix& matrix, Finish&& finish) {
  const int groups = (count + kTaskRows - 1) / kTaskRows;
  member.each(panels_of(matrix.outputs) * groups, [&](int task) {
    const int panel = task / groups, first = task % groups * kTaskRows;
    multiply_panel(rows + first * stride, stride, std::min(kTaskRows, count - first), matrix, panel, member.threads(),
                   [&](int row, auto size, auto& sums) { finish(first + row, size, panel * kPanelColumns, sums); });
  });
}

}  // namespace headrace
