// Attention over a paged cache. Keys and values lie head by head, [key heads][slots][D]; a context is read in runs of
// kRun positions, aligned to absolute positions, with an online softmax (Milakov and Gimelshein, 2018). A query's result
// depends on its own context only: neither on the other queries of its tile nor on how its prompt was cut into chunks.
#pragma once
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
  Buffer<T> queries, keys, values, weights, unpacked_keys, unpacked_values;
  Buffer<float> scores, sums, highest, totals;

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

// Queries of one task: tokens `first` .. `first + count - 1` of a span, for the query heads that share one key head.
struct Tile {
  const Span* span;
  int head;
  int first;
  int count;

  int start() const { return span->length - span->count + first; }  // position of the first query
  int length() const { return start() + count; }                    // of the context of the last query
};

// One head's keys or values of one sequence, `length` positions.
template <class T>
struct Stored {
  const Cache<T>& cache;
  long row;  // the head's first in the cache
  int dim;
  const int* blocks;
  int length;

  int in_run(int first) const { return std::min(kRun, length - first); }
  long slot(int first, int tile) const { return row + static_cast<long>(blocks[first / kBlock + tile]) * kBlock; }
};

// Has a run on its way from memory before it is read: contexts lie scattered, and the hardware does not guess where. A few
// lines at a time, between other work: of a burst most are dropped.
class Fetch {
 public:
  Fetch() = default;

  template <class T>
  Fetch(const Stored<T>& stored, int first) {
    const size_t size = stored.dim * (stored.cache.scales ? sizeof(int8_t) : sizeof(T));
    const int length = stored.in_run(first);
    for (; blocks_ * kBlock < length; blocks_++)
      begins_[blocks_] = static_cast<const char*>(stored.cache.elements) + stored.slot(first, blocks_) * size;
    bytes_ = kBlock * size;
  }

  void lines(int count) {
    for (; count > 0 && block_ < blocks_; count--) {
      _mm_prefetch(begins_[block_] + offset_, _MM_HINT_T0);
      offset_ += kLine;
      if (offset_ >= bytes_) offset_ = 0, block_++;
    }
  }

 private:
  const char* begins_[kRunTiles];
  size_t bytes_ = 0, offset_ = 0;
  int blocks_ = 0, block_ = 0;
};

// A run of positions, block by block, kBlock rows behind one another in each.
template <class T>
struct Run {
  const T* blocks[kRunTiles];
  int length;  // positions that exist
};

// Positions `first` and on; they stay where they are, or are unpacked to `unpacked`.
template <class T>
inline Run<T> run_of(const Stored<T>& stored, int first, T* unpacked) {
  const int dim = stored.dim;
  Run<T> run{{}, stored.in_run(first)};
  for (int tile = 0; tile * kBlock < run.length; tile++) {
    const long slot = stored.slot(first, tile);
    if (stored.cache.scales) {
      const int8_t* from = static_cast<const int8_t*>(stored.cache.elements) + slot * dim;
      T* to = unpacked + tile * kBlock * dim;
      for (int i = 0; i < std::min(kBlock, run.length - tile * kBlock); i++)
        unpack(from + i * dim, stored.cache.scales[slot + i], dim, to + i * dim);
      run.blocks[tile] = to;
    } else {
      run.blocks[tile] = static_cast<const T*>(stored.cache.elements) + slot * dim;
    }
  }
  return run;
}

template <class T>
inline __m512i dwords(const T* from, int elements) {
  if (elements >= kLanes * kStep<T>) return _mm512_loadu_si512(from);
  if constexpr (sizeof(T) == 2)
    return _mm512_maskz_loadu_epi16((1u << elements) - 1, from);
  else
    return _mm512_maskz_loadu_epi32(lanes_below(elements), from);
}

// A run of keys becomes a panel [step][tile][lane] whose columns are the positions. Tiles beyond its end are left as they
// are: their scores are never looked at.
template <class T>
inline void pack_keys(T* panel, int dim, const Run<T>& run, Fetch& ahead) {
  const int steps = steps_of<T>(dim);
  for (int tile = 0; tile * kBlock < run.length; tile++) {
    const int count = std::min(kBlock, run.length - tile * kBlock);
    for (int step = 0; step < steps; step += kLanes) {
      ahead.lines(kLanes / 2);
      __m512i block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++)
        block[i] = i < count ? dwords(run.blocks[tile] + i * dim + step * kStep<T>, dim - step * kStep<T>)
                             : _mm512_setzero_si512();
      transpose(block);
      T* to = panel + (static_cast<size_t>(step) * kRun + tile * kLanes) * kStep<T>;
      if (steps - step >= kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) _mm512_storeu_si512(to + i * kRun * kStep<T>, block[i]);
      } else {
        for (int i = 0; i < steps - step; i++) _mm512_storeu_si512(to + i * kRun * kStep<T>, block[i]);
      }
    }
  }
}

// A run of values becomes panels of kRun columns, [panel][step][column], whose columns are the elements. How many steps of
// each are filled: positions that do not exist are zeros, or beyond the steps.
template <class T>
inline int pack_values(T* panels, int dim, const Run<T>& run, Fetch& ahead) {
  const int steps = steps_of<T>(run.length);
  for (int column = 0; column < round_up(dim, kRun); column += kLanes * kStep<T>) {
    T* to = panels + (static_cast<size_t>(column / kRun) * kRun * kRun) + column % kRun * kStep<T>;
    const int elements = std::max(0, std::min(kLanes * kStep<T>, dim - column));
    for (int step = 0; step < steps; step++, to += kRun * kStep<T>) {
      ahead.lines(1);
      const int position = step * kStep<T>;
      const T* row = run.blocks[position / kBlock] + position % kBlock * dim + column;
      const __m512i first = dwords(row, elements);
      if constexpr (sizeof(T) == 2) {
        const __m512i second = position + 1 < run.length ? dwords(row + dim, elements) : _mm512_setzero_si512();
        _mm512_storeu_si512(to, _mm512_permutex2var_epi16(first, interleaved(0), second));
        _mm512_storeu_si512(to + kLanes * kStep<T>, _mm512_permutex2var_epi16(first, interleaved(16), second));
      } else {
        _mm512_storeu_si512(to, first);
      }
    }
  }
  return steps;
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

// One layer's attention: the cache, the queries of the whole batch and where the results go, row by row.
template <class T>
struct Attention {
  const AttentionShape& shape;
  Cache<T> keys, values;
  long slots;
  const T* queries;
  size_t query_stride;
  T* out;
  size_t out_stride;

  Stored<T> keys_of(const Tile& tile) const {
    return {keys, tile.head * slots, shape.key_dim, tile.span->blocks, tile.length()};
  }
  Stored<T> values_of(const Tile& tile) const {
    return {values, tile.head * slots, shape.value_dim, tile.span->blocks, tile.length()};
  }
  int first_run(const Tile& tile) const {
    return shape.window ? std::max(0, tile.start() - shape.window + 1) / kRun * kRun : 0;
  }
};

template <class T>
inline void begin_tile(const Attention<T>& attention, const Tile& tile, int rows, Workspace<T>& work) {
  const AttentionShape& shape = attention.shape;
  const int sharing = shape.heads / shape.key_heads, dim = steps_of<T>(shape.key_dim) * kStep<T>;
  for (int r = 0; r < rows; r++) {
    const int head = tile.head * sharing + r % sharing;
    const T* from = attention.queries + (tile.span->row + tile.first + r / sharing) * attention.query_stride;
    std::memcpy(work.queries.data() + r * dim, from + static_cast<size_t>(head) * shape.key_dim, shape.key_dim * sizeof(T));
    work.highest[r] = shape.sinks ? shape.sinks[head] : -kInfinity;
    work.totals[r] = shape.sinks ? 1 : 0;
  }
  std::fill_n(work.sums.begin(), static_cast<size_t>(rows) * round_up(shape.value_dim, kRun), 0.0f);
}

template <class T>
inline void end_tile(const Attention<T>& attention, const Tile& tile, int rows, Workspace<T>& work) {
  const AttentionShape& shape = attention.shape;
  const int sharing = shape.heads / shape.key_heads, width = round_up(shape.value_dim, kRun);
  for (int r = 0; r < rows; r++) {
    T* to = attention.out + (tile.span->row + tile.first + r / sharing) * attention.out_stride +
            static_cast<size_t>(tile.head * sharing + r % sharing) * shape.value_dim;
    const float* from = work.sums.data() + static_cast<size_t>(r) * width;
    const __m512 total = _mm512_set1_ps(work.totals[r]);
    for (int column = 0; column < shape.value_dim; column += kLanes)
      store(to + column, _mm512_div_ps(_mm512_loadu_ps(from + column), total), lanes_below(shape.value_dim - column));
  }
}

// The sums of earlier runs, times `work.scores[row * kRun]` each, and this run's weights times its values.
template <class T>
inline void add_values(int rows, int steps, int width, Workspace<T>& work, Fetch& ahead) {
  for (int column = 0; column < width; column += kRun)
    in_tiles<kRunRows>(rows, [&](int, int row, auto size) {
      multiply<T, decltype(size)::value, kRunTiles>(
          work.weights.data() + row * kRun, kRun, work.values.data() + static_cast<size_t>(column) * kRun, steps,
          [&](int) { ahead.lines(1); },
          [&](auto& sums) {
            for (int r = 0; r < size; r++) {
              const __m512 earlier = _mm512_set1_ps(work.scores[(row + r) * kRun]);
              float* to = work.sums.data() + static_cast<size_t>(row + r) * width + column;
              for (int t = 0; t < kRunTiles; t++, to += kLanes)
                _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_loadu_ps(to), earlier, sums[r][t]));
            }
          });
    });
}

// `later`, if not null, is what this thread computes next: its first keys and values are fetched meanwhile.
template <class T>
inline void attend(const Attention<T>& attention, const Tile& tile, const Tile* later, Workspace<T>& work) {
  const AttentionShape& shape = attention.shape;
  const int sharing = shape.heads / shape.key_heads, rows = tile.count * sharing;
  const int steps = steps_of<T>(shape.key_dim), dim = steps * kStep<T>;
  const Stored<T> keys = attention.keys_of(tile), values = attention.values_of(tile);
  begin_tile(attention, tile, rows, work);
  for (int run = attention.first_run(tile); run < tile.length(); run += kRun) {
    const bool last = run + kRun >= tile.length();
    Fetch next_keys, next_values;
    if (!last) {
      next_keys = Fetch(keys, run + kRun);
      next_values = Fetch(values, run + kRun);
    } else if (later) {
      next_keys = Fetch(attention.keys_of(*later), attention.first_run(*later));
      next_values = Fetch(attention.values_of(*later), attention.first_run(*later));
    }
    pack_keys(work.keys.data(), shape.key_dim, run_of(keys, run, work.unpacked_keys.data()), next_keys);
    in_tiles<kRunRows>(rows, [&](int, int row, auto size) {
      multiply<T, decltype(size)::value, kRunTiles>(
          work.queries.data() + row * dim, dim, work.keys.data(), steps, [&](int) { next_keys.lines(1); }, [&](auto& sums) {
            for (int r = 0; r < size; r++)
              for (int t = 0; t < kRunTiles; t++)
                _mm512_storeu_ps(work.scores.data() + (row + r) * kRun + t * kLanes, sums[r][t]);
          });
    });
    for (int r = 0; r < rows; r++)
      work.scores[r * kRun] = soften(work.scores.data() + r * kRun, work.weights.data() + r * kRun, shape, run,
                                     tile.start() + r / sharing, work.highest[r], work.totals[r]);
    const int value_steps =
        pack_values(work.values.data(), shape.value_dim, run_of(values, run, work.unpacked_values.data()), next_values);
    add_values(rows, value_steps, round_up(shape.value_dim, kRun), work, next_values);
  }
  end_tile(attention, tile, rows, work);
}

}  // namespace headrace
