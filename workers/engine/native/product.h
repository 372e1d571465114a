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
constexpr int kGroup = 32;        // numbers of a row in 8 bits that share a scale
constexpr int kGroupSteps = kGroup / kStep<int8_t>;
constexpr int kNumbersRows = 4;   // sums of whole numbers and sums of floats share the registers
constexpr int kLine = 64;         // bytes of a cache line
constexpr int kStreamAhead = 4096;  // bytes: beyond the page, where the hardware's own prefetching stops

// A matrix [outputs, inputs] in panels of columns: [panel][step][tile][lane] dwords, zeros beyond its edges. Its elements are
// of the model's type; or, where there are scales, whole numbers in 8 bits, stored 128 too high to be unsigned.
struct Matrix {
  const void* panels;
  const float* scales;  // [outputs, padded with zeros], or null
  const float* bias;    // [outputs, padded], or null
  int outputs;
  int inputs;
};

// Of a matrix that is `inputs` deep: whole groups, of numbers in 8 bits.
template <>
inline int steps_of<uint8_t>(int inputs) {
  return round_up(inputs, kGroup) / kStep<uint8_t>;
}

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

// Rows as a product reads them: elements of the model's type ...
template <class T>
struct Elements {
  using Weight = T;
  static constexpr int kRowsAtOnce = kPanelRows;

  const T* rows;
  size_t stride;

  Elements from(int row) const { return {rows + row * stride, stride}; }
};

template <int ROWS, int TILES, class T, class Fetch, class Finish>
inline __attribute__((always_inline)) void multiply(const Elements<T>& x, const T* panel, int steps, Fetch&& fetch,
                                                    Finish&& finish) {
  multiply<T, ROWS, TILES>(x.rows, x.stride, panel, steps, fetch, finish);
}

// ... or whole numbers in 8 bits, group by group.
struct Group {
  float scale;
  int begin;  // what a sum begins with: minus what it will have too much because the weights are 128 too high
};

struct Numbers {
  using Weight = uint8_t;
  static constexpr int kRowsAtOnce = kNumbersRows;

  const int8_t* rows;
  size_t stride;        // a multiple of kGroup
  const Group* groups;  // of all rows behind one another

  Numbers from(int row) const { return {rows + row * stride, stride, groups + row * (stride / kGroup)}; }
};

// A row of `count` elements, zeros behind them up to a whole group, in 8 bits. One that is no number makes its group's scale
// none, and with it all sums of the row.
template <class T>
inline void quantise_groups(const T* x, int count, int8_t* numbers, Group* groups) {
  for (int i = 0; i < count; i += kGroup, groups++) {
    const __m512 low = load(x + i, 0xffff), high = load(x + i + kLanes, 0xffff);
    // As whole numbers, since these order what is no number above infinity.
    const int bits = _mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_castps_si512(_mm512_abs_ps(low)),
                                                              _mm512_castps_si512(_mm512_abs_ps(high))));
    float highest;
    std::memcpy(&highest, &bits, sizeof highest);
    groups->scale = std::max(highest / 127, std::numeric_limits<float>::min());
    const __m512 divisor = _mm512_set1_ps(groups->scale);
    const __m512i first = _mm512_cvtps_epi32(_mm512_div_ps(low, divisor));
    const __m512i second = _mm512_cvtps_epi32(_mm512_div_ps(high, divisor));
    groups->begin = -128 * _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(numbers + i), _mm512_cvtsepi32_epi8(first));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(numbers + i + kLanes), _mm512_cvtsepi32_epi8(second));
  }
}

#ifdef __AVX512VNNI__
// Whole numbers are added up exactly within a group, the groups in order. `steps` are whole groups.
template <int ROWS, int TILES, class Fetch, class Finish>
inline __attribute__((always_inline)) void multiply(const Numbers& x, const uint8_t* panel, int steps, Fetch&& fetch,
                                                    Finish&& finish) {
  __m512 sums[ROWS][TILES];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int t = 0; t < TILES; t++) sums[r][t] = _mm512_setzero_ps();
  for (int group = 0; group < steps / kGroupSteps; group++) {
    const Group* groups = x.groups + group;
    __m512i whole[ROWS][TILES];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int t = 0; t < TILES; t++) whole[r][t] = _mm512_set1_epi32(groups[r * (x.stride / kGroup)].begin);
    for (int step = group * kGroupSteps; step < (group + 1) * kGroupSteps; step++) {
      __m512i weights[TILES];
#pragma GCC unroll 4
      for (int t = 0; t < TILES; t++)
        weights[t] = _mm512_loadu_si512(panel + (static_cast<size_t>(step) * TILES + t) * kLanes * kStep<uint8_t>);
      fetch(step);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) {
        int dword;
        std::memcpy(&dword, x.rows + r * x.stride + step * kStep<int8_t>, sizeof dword);
        const __m512i numbers = _mm512_set1_epi32(dword);
#pragma GCC unroll 4
        for (int t = 0; t < TILES; t++) whole[r][t] = _mm512_dpbusd_epi32(whole[r][t], weights[t], numbers);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      const __m512 scale = _mm512_set1_ps(groups[r * (x.stride / kGroup)].scale);
#pragma GCC unroll 4
      for (int t = 0; t < TILES; t++) sums[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[r][t]), scale, sums[r][t]);
    }
  }
  finish(sums);
}
#endif

// Columns in 8 bits get their scales; others have none.
template <class Weight, class Sums>
inline void scale_columns(const Matrix& matrix, int panel, int rows, Sums& sums) {
  if constexpr (sizeof(Weight) == 1)
    for (int t = 0; t < kPanelTiles; t++) {
      const __m512 scales = _mm512_loadu_ps(matrix.scales + panel * kPanelColumns + t * kLanes);
      for (int r = 0; r < rows; r++) sums[r][t] = _mm512_mul_ps(sums[r][t], scales);
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
template <class X, class Finish>
inline void multiply_panel(const X& x, int count, const Matrix& matrix, int panel, const typename X::Weight* next,
                           Finish&& finish) {
  using Weight = typename X::Weight;
  const int steps = steps_of<Weight>(matrix.inputs);
  const Weight* weights = panel_of<Weight>(matrix, panel);
  in_tiles<X::kRowsAtOnce>(count, [&](int number, int first, auto size) {
    constexpr int kRows = decltype(size)::value;
    const X rows = x.from(first);
    const auto done = [&](auto& sums) {
      scale_columns<Weight>(matrix, panel, size, sums);
      finish(first, size, sums);
    };
    if (number == 0)
      multiply<kRows, kPanelTiles>(rows, weights, steps,
                                   Stream<kPanelTiles>{reinterpret_cast<const char*>(weights) + kStreamAhead}, done);
    else if (number <= kPanelTiles)
      multiply<kRows, kPanelTiles>(
          rows, weights, steps,
          Stream<1>{reinterpret_cast<const char*>(next) + static_cast<size_t>(number - 1) * steps * kLine}, done);
    else
      multiply<kRows, kPanelTiles>(rows, weights, steps, Stream<0>{}, done);
  });
}

// All of `count` rows times `matrix`, shared out over the team's members: `finish(row, n, column, sums)`.
template <class X, class Finish>
inline void product(Member& member, const X& x, int count, const Matrix& matrix, Finish&& finish) {
  const int groups = (count + kTaskRows - 1) / kTaskRows;
  member.each(panels_of(matrix.outputs) * groups, [&](int task, int next) {
    const int panel = task / groups, first = task % groups * kTaskRows;
    multiply_panel(x.from(first), std::min(kTaskRows, count - first), matrix, panel,
                   panel_of<typename X::Weight>(matrix, next / groups),
                   [&](int row, auto size, auto& sums) { finish(first + row, size, panel * kPanelColumns, sums); });
  });
}

}  // namespace headrace
