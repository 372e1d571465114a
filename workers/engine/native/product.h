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

// Fetches LINES cache lines in each step of a product, from `from` on.
template <int LINES>
struct Stream {
  const char* from;

  void operator()(int step) const {
#pragma GCC unroll 4
    for (int line = 0; line < LINES; line++)
      _mm_prefetch(from + (static_cast<size_t>(step) * LINES + line) * kLine, LINES == 1 ? _MM_HINT_T1 : _MM_HINT_T0);
  }
};

// `finish(sums)` gets ROWS x TILES vectors: `rows`, `stride` elements apart, times a panel `steps` dwords deep. `fetch(step)`
// has what is needed later on its way from memory.
template <class T, int ROWS, int TILES, class Fetch, class Finish>
inline __attribute__((always_inline)) void multiply(const T* rows, size_t stride, const T* panel, int steps,
                                                    Fetch&& fetch, Finish&& finish) {
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
    fetch(step);
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

template <class T>
inline const T* panel_of(const Matrix& matrix, int panel) {
  return static_cast<const T*>(matrix.panels) +
         static_cast<size_t>(panel) * steps_of<T>(matrix.inputs) * kPanelColumns * kStep<T>;
}

// `count` rows times one panel of `matrix`. `finish(row, n, sums)` gets n rows of kPanelTiles vectors of sums each, from
// row `row` on. The weights come from memory once: the first tile of rows waits for them and looks ahead in the stream, the
// others fetch the panel that this thread computes next, from `next` on.
template <class T, class Finish>
inline void multiply_panel(const T* rows, size_t stride, int count, const Matrix& matrix, int panel, const T* next,
                           Finish&& finish) {
  const int steps = steps_of<T>(matrix.inputs);
  const T* weights = panel_of<T>(matrix, panel);
  in_tiles<kPanelRows>(count, [&](int number, int first, auto size) {
    constexpr int kRows = decltype(size)::value;
    const T* begin = rows + first * stride;
    const auto done = [&](auto& sums) { finish(first, size, sums); };
    if (number == 0)
      multiply<T, kRows, kPanelTiles>(begin, stride, weights, steps,
                                      Stream<kPanelTiles>{reinterpret_cast<const char*>(weights) + kStreamAhead}, done);
    else if (number <= kPanelTiles)
      multiply<T, kRows, kPanelTiles>(
          begin, stride, weights, steps,
          Stream<1>{reinterpret_cast<const char*>(next) + static_cast<size_t>(number - 1) * steps * kLine}, done);
    else
      multiply<T, kRows, kPanelTiles>(begin, stride, weights, steps, Stream<0>{}, done);
  });
}

// All of `rows` times `matrix`, shared out over the team's members: `finish(row, n, column, sums)`.
template <class T, class Finish>
inline void product(Member& member, const T* rows, size_t stride, int count, const Matrix& matrix, Finish&& finish) {
  const int groups = (count + kTaskRows - 1) / kTaskRows;
  member.each(panels_of(matrix.outputs) * groups, [&](int task, int next) {
    const int panel = task / groups, first = task % groups * kTaskRows;
    multiply_panel(rows + first * stride, stride, std::min(kTaskRows, count - first), matrix, panel,
                   panel_of<T>(matrix, next / groups),
                   [&](int row, auto size, auto& sums) { finish(first + row, size, panel * kPanelColumns, sums); });
  });
}

}  // namespace headrace
