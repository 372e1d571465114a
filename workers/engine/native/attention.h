// Attention over a paged cache. Keys and values lie head by head, [key heads][slots][D]; a context is read in runs of
// kRun positions, aligned to absolute positions, with an online softmax (Milakov and Gimelshein, 2018). A query's result
// depends on its own context only: neither on the other queries of its tile nor on how its prompt was cut into chunks.
#pragma once
#include <vector>

#include "product.h"

namespace headrace {

constexpr int kBlock = 16;  // tokens of a block of the cache
constexpr int kRun = 64;    // positions that are attended to at once
constexpr int kRunTiles = kRun / kLanes;
constexpr int kRunRows = 6;    // with four tiles of columns
constexpr int kTileRows = 48;  // queries of one task, unless more share one key head

// Tokens of one sequence in a step, and where its context lies.
struct Span {
  int row;            // of its first token in the batch
  int count;          // tokens: the queries
  int length;         // of the context, its own tokens included
  const int* blocks;  // numbers of the cache's blocks, by position / kBlock
};

struct AttentionShape {
  int heads;      // of the queries
  int key_heads;  // each is shared by heads / key_heads query heads
  int key_dim;
  int value_dim;
  float scaling;
  float softcap;       // 0: none
  int window;          // a query sees this many positions, its own included; 0: all
  const float* sinks;  // [heads]: one more logit in each softmax, with no value; or null
};

// Keys or values, head by head: [key heads][slots][D] of T; or, where there are scales, of whole numbers in 8 bits with one
// scale for each head and slot, [key heads][slots].
template <class T>
struct Cache {
  const void* elements;
  const T* scales;
};

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// `count` elements in 8 bits, as kv_int8.py has it: rounded with the very scale that is stored.
template <class T>
inline void quantise(const T* x, int count, int8_t* out, T* scale) {
  __m512 highest = _mm512_setzero_ps();
  for (int i = 0; i < count; i += kLanes)
    highest = _mm512_max_ps(highest, _mm512_abs_ps(load(x + i, lanes_below(count - i))));
  store(scale, _mm512_set1_ps(_mm512_reduce_max_ps(highest) * static_cast<float>((1 + 1 / 256.0) / 127)), 1);
  const __m512 divisor = _mm512_set1_ps(std::max(to_float(*scale), std::numeric_limits<float>::min()));
  const __m512i most = _mm512_set1_epi32(127), least = _mm512_set1_epi32(-127);
  for (int i = 0; i < count; i += kLanes) {
    const __mmask16 mask = lanes_below(count - i);
    const __m512i rounded = _mm512_cvtps_epi32(_mm512_div_ps(load(x + i, mask), divisor));
    _mm512_mask_cvtepi32_storeu_epi8(out + i, mask, _mm512_max_epi32(least, _mm512_min_epi32(most, rounded)));
  }
}

template <class T>
inline void unpack(const int8_t* x, T scale, int count, T* out) {
  const __m512 times = _mm512_set1_ps(to_float(scale));
  for (int i = 0; i < count; i += kLanes) {
    const __mmask16 mask = lanes_below(count - i);
    const __m512 numbers = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, x + i)));
    store(out + i, _mm512_mul_ps(numbers, times), mask);
  }
}

inline int attention_tile_tokens(const AttentionShape& shape) {
  return std::max(1, kTileRows / (shape.heads / shape.key_heads));
}

// What one thread needs for a tile of queries.
template <class T>
struct Workspace {
  std::vector<T> queries, keys, values, weights, unpacked_keys, unpacked_values;
  std::vector<float> scores, sums, highest, totals;

  explicit Workspace(const AttentionShape& shape) {
    const int rows = attention_tile_tokens(shape) * (shape.heads / shape.key_heads);
    queries.resize(static_cast<size_t>(rows) * round_up(shape.key_dim, 2));
    keys.resize(static_cast<size_t>(kRun) * round_up(shape.key_dim, 2 * kLanes));
    values.resize(static_cast<size_t>(kRun) * round_up(shape.value_dim, kRun));
    weights.resize(static_cast<size_t>(rows) * kRun);
    unpacked_keys.resize(static_cast<size_t>(kRun) * shape.key_dim);
    unpacked_values.resize(static_cast<size_t>(kRun) * shape.value_dim);
    scores.resize(static_cast<size_t>(rows) * kRun);
    sums.resize(static_cast<size_t>(rows) * round_up(shape.value_dim, kRun));
    highest.resize(rows);
    totals.resize(rows);
  }
};

// [kRun][dim] at `from(position)` becomes a panel [step][tile][lane] whose columns are the positions; null rows become zeros.
template <class T, class From>
inline void pack_keys(T* panel, int dim, From&& from) {
  const int steps = steps_of<T>(dim);
  for (int tile = 0; tile < kRunTiles; tile++) {
    const T* rows[kLanes];
    for (int i = 0; i < kLanes; i++) rows[i] = from(tile * kLanes + i);
    for (int step = 0; step < steps; step += kLanes) {
      const int elements = dim - step * kStep<T>;
      __m512i block[kLanes];
      for (int i = 0; i < kLanes; i++) {
        if constexpr (sizeof(T) == 2)
          block[i] = rows[i] ? _mm512_maskz_loadu_epi16(elements >= 32 ? ~0u : (1u << elements) - 1, rows[i] + 2 * step)
                             : _mm512_setzero_si512();
        else
          block[i] = rows[i] ? _mm512_maskz_loadu_epi32(lanes_below(elements), rows[i] + step) : _mm512_setzero_si512();
      }
      transpose(block);
      for (int i = 0; i < std::min(kLanes, steps - step); i++)
        _mm512_storeu_si512(panel + (static_cast<size_t>(step + i) * kRun + tile * kLanes) * kStep<T>, block[i]);
    }
  }
}

// [kRun][dim] becomes panels of kRun columns, [panel][step][column], whose columns are the elements.
template <class T, class From>
inline void pack_values(T* panels, int dim, From&& from) {
  const int steps = kRun / kStep<T>;
  for (int column = 0; column < round_up(dim, kRun); column += 2 * kLanes) {
    T* to = panels + (static_cast<size_t>(column / kRun) * steps * kRun + column % kRun) * kStep<T>;
    const int elements = std::max(0, std::min(2 * kLanes, dim - column));
    for (int step = 0; step < steps; step++, to += kRun * kStep<T>) {
      if constexpr (sizeof(T) == 2) {
        const __mmask32 mask = elements >= 32 ? ~0u : (1u << elements) - 1;
        const T *even = from(2 * step), *odd = from(2 * step + 1);
        const __m512i a = even ? _mm512_maskz_loadu_epi16(mask, even + column) : _mm512_setzero_si512();
        const __m512i b = odd ? _mm512_maskz_loadu_epi16(mask, odd + column) : _mm512_setzero_si512();
        const __m512i low = _mm512_or_si512(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(a)),
                                            _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(b)), 16));
        const __m512i high =
            _mm512_or_si512(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(a, 1)),
                            _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(b, 1)), 16));
        _mm512_storeu_si512(to, low);
        _mm512_storeu_si512(to + 2 * kLanes, high);
      } else {
        const T* row = from(step);
        for (int half = 0; half < 2; half++)
          store(to + half * kLanes, row ? load(row + column + half * kLanes, lanes_below(elements - half * kLanes))
                                        : _mm512_setzero_ps());
      }
    }
  }
}

// cap * tanh(x / cap)
inline __m512 capped(__m512 x, float cap) {
  const __m512 one = _mm512_set1_ps(1), limit = _mm512_set1_ps(cap);
  const __m512 e = exp(_mm512_mul_ps(x, _mm512_set1_ps(2 / cap)));
  return _mm512_mul_ps(limit, _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2), _mm512_add_ps(e, one))));
}

// One row of scores, of positions `first` and on, becomes weights e^(score - highest); what the weights of earlier runs
// must be multiplied by is returned.
template <class T>
inline float soften(float* scores, T* weights, const AttentionShape& shape, int first, int position, float& highest,
                    float& total) {
  const __m512 places = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const int oldest = shape.window ? position - shape.window + 1 : 0;
  __m512 row[kRunTiles];
  __m512 top = _mm512_set1_ps(highest);
  for (int t = 0; t < kRunTiles; t++) {
    row[t] = _mm512_mul_ps(_mm512_loadu_ps(scores + t * kLanes), _mm512_set1_ps(shape.scaling));
    if (shape.softcap) row[t] = capped(row[t], shape.softcap);
    const __m512 place = _mm512_add_ps(places, _mm512_set1_ps(first + t * kLanes));
    const __mmask16 seen = _mm512_cmp_ps_mask(place, _mm512_set1_ps(position), _CMP_LE_OQ) &
                           _mm512_cmp_ps_mask(place, _mm512_set1_ps(oldest), _CMP_GE_OQ);
    row[t] = _mm512_mask_blend_ps(seen, _mm512_set1_ps(-kInfinity), row[t]);
    top = _mm512_max_ps(top, row[t]);
  }
  const float now = _mm512_reduce_max_ps(top);
  // Where nothing has been seen yet both are -inf, and their difference would be NaN.
  const __m512 base = _mm512_set1_ps(std::max(now, -1e30f));
  __m512 sum = _mm512_setzero_ps();
  for (int t = 0; t < kRunTiles; t++) {
    const __m512 weight = exp(_mm512_sub_ps(row[t], base));
    sum = _mm512_add_ps(sum, weight);
    store(weights + t * kLanes, weight);
  }
  const float earlier = _mm512_cvtss_f32(exp(_mm512_sub_ps(_mm512_set1_ps(highest), base)));
  total = total * earlier + _mm512_reduce_add_ps(sum);
  highest = now;
  return earlier;
}

// Tokens `first` .. `first + count - 1` of a span for one key head: `queries` and `out` are rows of the whole batch.
template <class T>
inline void attend(const AttentionShape& shape, const Cache<T>& keys, const Cache<T>& values, long slots, const Span& span,
                   int head, int first, int count, const T* queries, size_t query_stride, T* out, size_t out_stride,
                   Workspace<T>& work) {
  const int sharing = shape.heads / shape.key_heads, rows = count * sharing;
  const int steps = steps_of<T>(shape.key_dim), dim = steps * kStep<T>, width = round_up(shape.value_dim, kRun);
  const int start = span.length - span.count + first;  // position of the first query
  for (int r = 0; r < rows; r++) {
    const T* from = queries + (span.row + first + r / sharing) * query_stride +
                    static_cast<size_t>(head * sharing + r % sharing) * shape.key_dim;
    std::memcpy(work.queries.data() + r * dim, from, shape.key_dim * sizeof(T));
    work.highest[r] = shape.sinks ? shape.sinks[head * sharing + r % sharing] : -kInfinity;
    work.totals[r] = shape.sinks ? 1 : 0;
  }
  std::fill_n(work.sums.begin(), static_cast<size_t>(rows) * width, 0.0f);
  const int oldest = shape.window ? std::max(0, start - shape.window + 1) : 0;
  for (int run = oldest / kRun * kRun; run < start + count; run += kRun) {
    const int places = std::min(kRun, start + count - run);
    const auto slot_of = [&](int place) {
      const int position = run + place;
      return head * slots + static_cast<long>(span.blocks[position / kBlock]) * kBlock + position % kBlock;
    };
    const auto row_of = [&](const Cache<T>& cache, const std::vector<T>& unpacked, int place, int elements) -> const T* {
      if (place >= places) return nullptr;
      return cache.scales ? unpacked.data() + place * elements
                          : static_cast<const T*>(cache.elements) + slot_of(place) * elements;
    };
    if (keys.scales)
      for (int place = 0; place < places; place++) {
        const long slot = slot_of(place);
        unpack(static_cast<const int8_t*>(keys.elements) + slot * shape.key_dim, keys.scales[slot], shape.key_dim,
               work.unpacked_keys.data() + place * shape.key_dim);
        unpack(static_cast<const int8_t*>(values.elements) + slot * shape.value_dim, values.scales[slot], shape.value_dim,
               work.unpacked_values.data() + place * shape.value_dim);
      }
    pack_keys(work.keys.data(), shape.key_dim,
              [&](int place) { return row_of(keys, work.unpacked_keys, place, shape.key_dim); });
    pack_values(work.values.data(), shape.value_dim,
                [&](int place) { return row_of(values, work.unpacked_values, place, shape.value_dim); });
    in_tiles<kRunRows>(rows, [&](int, int row, auto size) {
      multiply<T, decltype(size)::value, kRunTiles, 0>(
          work.queries.data() + row * dim, dim, work.keys.data(), steps, nullptr, [&](auto& sums) {
            for (int r = 0; r < size; r++)
              for (int t = 0; t < kRunTiles; t++)
                _mm512_storeu_ps(work.scores.data() + (row + r) * kRun + t * kLanes, sums[r][t]);
          });
    });
    for (int r = 0; r < rows; r++) {
      const float earlier = soften(work.scores.data() + r * kRun, work.weights.data() + r * kRun, shape, run,
                                   start + r / sharing, work.highest[r], work.totals[r]);
      work.scores[r * kRun] = earlier;  // its scores are used up
    }
    for (int column = 0; column < width; column += kRun)
      in_tiles<kRunRows>(rows, [&](int, int row, auto size) {
        multiply<T, decltype(size)::value, kRunTiles, 0>(
            work.weights.data() + row * kRun, kRun, work.values.data() + static_cast<size_t>(column) * kRun,
            kRun / kStep<T>, nullptr, [&](auto& sums) {
              for (int r = 0; r < size; r++) {
                const __m512 earlier = _mm512_set1_ps(work.scores[(row + r) * kRun]);
                float* to = work.sums.data() + static_cast<size_t>(row + r) * width + column;
                for (int t = 0; t < kRunTiles; t++, to += kLanes)
                  _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_loadu_ps(to), earlier, sums[r][t]));
              }
            });
      });
  }
  for (int r = 0; r < rows; r++) {
    T* to = out + (span.row + first + r / sharing) * out_stride +
            static_cast<size_t>(head * sharing + r % sharing) * shape.value_dim;
    const __m512 total = _mm512_set1_ps(work.totals[r]);
    for (int column = 0; column < shape.value_dim; column += kLanes)
      store(to + column, _mm512_div_ps(_mm512_loadu_ps(work.sums.data() + static_cast<size_t>(r) * width + column), total),
            lanes_below(shape.value_dim - column));
  }
}

}  // namespace headrace
