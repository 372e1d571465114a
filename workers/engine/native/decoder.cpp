// A whole step of a decoder of the Llama kind: pre-norm layers of attention and a gated feed-forward part, RMSNorm, rotary
// embeddings in halves. One call per step, one team of threads from the embedding to the logits. The residual stream and
// everything between two products is float; what a product reads is rounded to the model's type once.
#include <omp.h>

#include <cmath>
#include <memory>

#include "attention.h"

namespace headrace {

// The structures below are mirrored in bindings.py, field by field.

struct Layer {
  const float* input_norm;      // [hidden]
  const float* query_norm;      // [head_dim], or null: none
  const float* key_norm;        // [head_dim], or null
  const float* attention_norm;  // [hidden]: before the feed-forward part
  Matrix qkv;
  Matrix out;
  Matrix gate_up;  // panels of gate and up in turn
  Matrix down;
  void* keys;    // [key heads][slots][head_dim]
  void* values;  // [key heads][slots][head_dim]
  void* key_scales;    // [key heads][slots], and the keys are int8_t; or null
  void* value_scales;  // null for both or for neither
  int window;    // 0: all positions are seen
};

struct Model {
  int hidden;
  int intermediate;
  int heads;
  int key_heads;
  int head_dim;
  int rotary_dim;  // leading elements of a head that are rotated
  int layers;
  int vocabulary;
  int activation;  // 0: SiLU, 1: GELU by tanh
  float epsilon;
  float scaling;  // of the scores
  long slots;
  const void* embedding;  // [vocabulary, hidden]
  const float* final_norm;
  Matrix head;
  const Layer* layer;
};

struct Batch {
  int tokens;
  int spans;
  int samples;
  const int64_t* ids;        // [tokens]
  const int64_t* positions;  // [tokens]
  const int64_t* slots;      // [tokens]: where each token's key and value go
  const int64_t* sampled;    // [samples]: rows whose logits are wanted
  const Span* span;          // [spans]
  const float* cosines;      // [positions, rotary_dim / 2]
  const float* sines;
  float* logits;        // [samples, logits_stride]
  long logits_stride;  // at least the vocabulary, in whole panels
};

constexpr int kHeadDimMax = 512;
constexpr int kPad = 96;  // elements: whole panels, and whole vectors of both types
constexpr int kRowsPerTask = 8;
constexpr int kPhasesPerLayer = 10;
constexpr int kPhasesBeside = 4;  // embedding, choice of rows, last norm, logits

template <class T>
struct Rows {
  int stride = 0;
  Buffer<T> data;

  Rows(int rows, int columns) : stride(round_up(columns, kPad)), data(static_cast<size_t>(rows) * stride) {}
  T* operator[](int row) { return data.data() + static_cast<size_t>(row) * stride; }
};

class Decoder {
 public:
  virtual ~Decoder() = default;
  virtual void step(const Batch& batch) = 0;
};

// weight * x / rms(x), `count` elements; both ends are padded with zeros to whole vectors.
template <class T>
inline void normalise(const float* x, const float* weight, int count, float epsilon, T* out) {
  __m512 squares = _mm512_setzero_ps();
  for (int i = 0; i < count; i += kLanes) {
    const __m512 v = load(x + i, lanes_below(count - i));
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const __m512 scale = _mm512_set1_ps(1 / std::sqrt(_mm512_reduce_add_ps(squares) / count + epsilon));
  for (int i = 0; i < count; i += kLanes) {
    const __mmask16 mask = lanes_below(count - i);
    store(out + i, _mm512_mul_ps(_mm512_mul_ps(load(x + i, mask), scale), load(weight + i, mask)), mask);
  }
}

inline __m512 vector_of(const float* bias, int column) {
  return bias ? _mm512_loadu_ps(bias + column) : _mm512_setzero_ps();
}

inline __m512 activated(__m512 x, int activation) {
  const __m512 one = _mm512_set1_ps(1);
  __m512 z = x;
  if (activation == 1) {  // x * (1 + tanh(u)) / 2 is x * sigmoid(2u)
    const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    z = _mm512_mul_ps(_mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x), _mm512_set1_ps(1.5957691216f));
  }
  return _mm512_div_ps(x, _mm512_add_ps(one, exp(_mm512_sub_ps(_mm512_setzero_ps(), z))));
}

template <class T>
class TypedDecoder final : public Decoder {
 public:
  TypedDecoder(const Model& model, int tokens_max, int threads)
      : model_(model),
        threads_(threads),
        team_(model.layers * kPhasesPerLayer + kPhasesBeside),
        shape_{model.heads, model.key_heads, model.head_dim, model.head_dim, model.scaling, 0, 0, nullptr},
        stream_(tokens_max, model.hidden),
        qkv_(tokens_max, (model.heads + 2 * model.key_heads) * model.head_dim),
        normed_(tokens_max, model.hidden),
        queries_(tokens_max, model.heads * model.head_dim),
        attended_(tokens_max, model.heads * model.head_dim),
        inner_(tokens_max, model.intermediate),
        numbers_(model.head.scales ? tokens_max : 0,
                 std::max({model.hidden, model.heads * model.head_dim, model.intermediate})),
        groups_(numbers_.data.size() / kGroup) {
    for (int i = 0; i < threads; i++) work_.push_back(std::make_unique<Workspace<T>>(shape_));
  }

  void step(const Batch& batch) override {
    team_.gather();
    plan(batch);
#pragma omp parallel num_threads(threads_)
    {
      Member member(team_, omp_get_thread_num());
      compute(batch, member);
    }
  }

 private:
  // Tiles of queries, the expensive ones first: the last tasks of a phase should be short.
  void plan(const Batch& batch) {
    tiles_.clear();
    const int tokens = attention_tile_tokens(shape_);
    for (int s = 0; s < batch.spans; s++)
      for (int first = 0; first < batch.span[s].count; first += tokens)
        for (int head = 0; head < model_.key_heads; head++)
          tiles_.push_back({&batch.span[s], head, first, std::min(tokens, batch.span[s].count - first)});
    const auto cost = [](const Tile& tile) { return static_cast<long>(tile.length()) * (tile.count + 1); };
    std::stable_sort(tiles_.begin(), tiles_.end(), [&](const Tile& a, const Tile& b) { return cost(a) > cost(b); });
  }

  void compute(const Batch& batch, Member& member) {
    for_rows(member, batch.tokens, [&](int row) { embed(batch.ids[row], stream_[row]); });
    int rows = batch.tokens;
    for (int index = 0; index < model_.layers; index++) {
      const Layer& layer = model_.layer[index];
      attention(batch, layer, member);
      if (index == model_.layers - 1) rows = keep_sampled(batch, member);
      if (rows == 0) return;
      prepare(member, attended_, rows, layer.out);
      multiply_rows(member, attended_, rows, layer.out, adding(layer.out.bias));
      feed_forward(layer, rows, member);
    }
    normalise_rows(member, rows, model_.final_norm, model_.head);
    multiply_rows(member, normed_, rows, model_.head, storing(batch.logits, batch.logits_stride, nullptr));
  }

  void attention(const Batch& batch, const Layer& layer, Member& member) {
    normalise_rows(member, batch.tokens, layer.input_norm, layer.qkv);
    multiply_rows(member, normed_, batch.tokens, layer.qkv, storing(qkv_[0], qkv_.stride, layer.qkv.bias));
    for_rows(member, batch.tokens, [&](int row) { place(batch, layer, row); });
    AttentionShape shape = shape_;
    shape.window = layer.window;
    const Attention<T> heads{shape,
                             {layer.keys, static_cast<const T*>(layer.key_scales)},
                             {layer.values, static_cast<const T*>(layer.value_scales)},
                             model_.slots,
                             queries_[0],
                             static_cast<size_t>(queries_.stride),
                             attended_[0],
                             static_cast<size_t>(attended_.stride)};
    const int count = static_cast<int>(tiles_.size());
    member.each(count, [&](int task, int next) {
      attend(heads, tiles_[task], next < count ? &tiles_[next] : nullptr, *work_[member.number]);
    });
  }

  void feed_forward(const Layer& layer, int rows, Member& member) {
    normalise_rows(member, rows, layer.attention_norm, layer.gate_up);
    with_input(normed_, layer.gate_up, [&](const auto& x) { gate(x, layer.gate_up, rows, member); });
    prepare(member, inner_, rows, layer.down);
    multiply_rows(member, inner_, rows, layer.down, adding(layer.down.bias));
  }

  // Panels of gate and up in turn, each pair by one thread.
  template <class X>
  void gate(const X& x, const Matrix& matrix, int rows, Member& member) {
    using Weight = typename X::Weight;
    const int panels = panels_of(model_.intermediate), groups = (rows + kTaskRows - 1) / kTaskRows;
    member.each(panels * groups, [&](int task, int next) {
      const int panel = task / groups, begin = task % groups * kTaskRows, count = std::min(kTaskRows, rows - begin);
      float gates[kTaskRows * kPanelColumns];
      const X from = x.from(begin);
      const Weight* up = panel_of<Weight>(matrix, 2 * panel + 1);
      multiply_panel(from, count, matrix, 2 * panel, up, [&](int row, auto size, auto& sums) {
        for (int t = 0; t < kPanelTiles; t++) {
          const __m512 more = vector_of(matrix.bias, 2 * panel * kPanelColumns + t * kLanes);
          for (int r = 0; r < size; r++)
            _mm512_storeu_ps(gates + (row + r) * kPanelColumns + t * kLanes,
                             activated(_mm512_add_ps(sums[r][t], more), model_.activation));
        }
      });
      const Weight* later = panel_of<Weight>(matrix, 2 * (next / groups));
      multiply_panel(from, count, matrix, 2 * panel + 1, later, [&](int row, auto size, auto& sums) {
        for (int t = 0; t < kPanelTiles; t++) {
          const __m512 more = vector_of(matrix.bias, (2 * panel + 1) * kPanelColumns + t * kLanes);
          for (int r = 0; r < size; r++)
            store(inner_[begin + row + r] + panel * kPanelColumns + t * kLanes,
                  _mm512_mul_ps(_mm512_add_ps(sums[r][t], more),
                                _mm512_loadu_ps(gates + (row + r) * kPanelColumns + t * kLanes)));
        }
      });
    });
  }

  // The stream's rows, for a product with `matrix`.
  void normalise_rows(Member& member, int rows, const float* weight, const Matrix& matrix) {
    for_rows(member, rows, [&](int row) {
      normalise(stream_[row], weight, model_.hidden, model_.epsilon, normed_[row]);
      if (matrix.scales) quantise_row(normed_, row, matrix);
    });
  }

  // A product in 8 bits reads rows that are quantised; there is one place for them, until the next.
  void prepare(Member& member, Rows<T>& rows, int count, const Matrix& matrix) {
    if (matrix.scales) for_rows(member, count, [&](int row) { quantise_row(rows, row, matrix); });
  }

  void quantise_row(Rows<T>& rows, int row, const Matrix& matrix) {
    const size_t begin = static_cast<size_t>(row) * rows.stride;
    quantise_groups(rows[row], matrix.inputs, &numbers_.data[begin], &groups_[begin / kGroup]);
  }

  template <class Finish>
  void multiply_rows(Member& member, Rows<T>& rows, int count, const Matrix& matrix, Finish&& finish) {
    with_input(rows, matrix, [&](const auto& x) { product(member, x, count, matrix, finish); });
  }

  // Calls `use` with rows, prepared, as a product with `matrix` reads them.
  template <class Use>
  void with_input(Rows<T>& rows, const Matrix& matrix, Use&& use) {
    const size_t stride = rows.stride;
    if (!matrix.scales) return use(Elements<T>{rows[0], stride});
#ifdef __AVX512VNNI__
    use(Numbers{numbers_[0], stride, groups_.data()});
#endif
  }

  // What a product does with its sums: they are added to the residual stream, or stored.
  auto adding(const float* bias) {
    return [this, bias](int row, auto size, int column, auto& sums) {
      for (int t = 0; t < kPanelTiles; t++) {
        const __m512 more = vector_of(bias, column + t * kLanes);
        for (int r = 0; r < size; r++) {
          float* to = stream_[row + r] + column + t * kLanes;
          _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_add_ps(sums[r][t], more)));
        }
      }
    };
  }

  auto storing(float* out, long stride, const float* bias) {
    return [=](int row, auto size, int column, auto& sums) {
      for (int t = 0; t < kPanelTiles; t++) {
        const __m512 more = vector_of(bias, column + t * kLanes);
        for (int r = 0; r < size; r++)
          _mm512_storeu_ps(out + (row + r) * stride + column + t * kLanes, _mm512_add_ps(sums[r][t], more));
      }
    };
  }

  void embed(int64_t id, float* row) {
    const T* from = static_cast<const T*>(model_.embedding) + id * model_.hidden;
    for (int i = 0; i < model_.hidden; i += kLanes) {
      const __mmask16 mask = lanes_below(model_.hidden - i);
      store(row + i, load(from + i, mask), mask);
    }
  }

  // Norms and rotation of one token's heads; its key and value go to the cache.
  void place(const Batch& batch, const Layer& layer, int row) {
    const int dim = model_.head_dim, half = model_.rotary_dim / 2;
    const float* cosines = batch.cosines + batch.positions[row] * half;
    const float* sines = batch.sines + batch.positions[row] * half;
    float* from = qkv_[row];
    for (int head = 0; head < model_.heads; head++, from += dim)
      rotate(from, layer.query_norm, cosines, sines, queries_[row] + head * dim);
    T rounded[kHeadDimMax];
    for (int head = 0; head < model_.key_heads; head++, from += dim) {
      rotate(from, layer.key_norm, cosines, sines, rounded);
      keep(rounded, layer.keys, layer.key_scales, head * model_.slots + batch.slots[row]);
    }
    for (int head = 0; head < model_.key_heads; head++, from += dim) {
      for (int i = 0; i < dim; i += kLanes) store(rounded + i, load(from + i, lanes_below(dim - i)), lanes_below(dim - i));
      keep(rounded, layer.values, layer.value_scales, head * model_.slots + batch.slots[row]);
    }
  }

  void keep(const T* head, void* cache, void* scales, long slot) {
    const int dim = model_.head_dim;
    if (scales)
      quantise(head, dim, static_cast<int8_t*>(cache) + slot * dim, static_cast<T*>(scales) + slot);
    else
      std::memcpy(static_cast<T*>(cache) + slot * dim, head, dim * sizeof(T));
  }

  void rotate(float* head, const float* norm, const float* cosines, const float* sines, T* out) {
    const int dim = model_.head_dim, half = model_.rotary_dim / 2;
    if (norm) normalise(head, norm, dim, model_.epsilon, head);
    for (int i = 0; i < half; i += kLanes) {
      const __mmask16 mask = lanes_below(half - i);
      const __m512 a = load(head + i, mask), b = load(head + half + i, mask);
      const __m512 c = load(cosines + i, mask), s = load(sines + i, mask);
      store(out + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)), mask);
      store(out + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)), mask);
    }
    for (int i = 2 * half; i < dim; i += kLanes)
      store(out + i, load(head + i, lanes_below(dim - i)), lanes_below(dim - i));
  }

  // After the last layer's attention only the rows that sample matter: they move to the front. How many they are.
  int keep_sampled(const Batch& batch, Member& member) {
    const auto move = [&](auto& rows) {
      auto kept = Rows<std::decay_t<decltype(rows[0][0])>>(batch.samples, rows.stride);
      for (int i = 0; i < batch.samples; i++) std::copy_n(rows[batch.sampled[i]], rows.stride, kept[i]);
      for (int i = 0; i < batch.samples; i++) std::copy_n(kept[i], rows.stride, rows[i]);
    };
    member.each(2, [&](int task, int) { task == 0 ? move(stream_) : move(attended_); });
    return batch.samples;
  }

  template <class Task>
  void for_rows(Member& member, int rows, Task&& task) {
    member.each((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int group, int) {
      for (int row = group * kRowsPerTask; row < std::min(rows, (group + 1) * kRowsPerTask); row++) task(row);
    });
  }

  const Model model_;
  const int threads_;
  Team team_;
  const AttentionShape shape_;
  Rows<float> stream_, qkv_;
  Rows<T> normed_, queries_, attended_, inner_;
  Rows<int8_t> numbers_;       // what a product in 8 bits reads
  std::vector<Group> groups_;  // of the numbers
  std::vector<std::unique_ptr<Workspace<T>>> work_;
  std::vector<Tile> tiles_;
};

// [outputs, inputs] into panels number `first`, `first + every`, ...
template <class T>
void pack(const T* weights, int outputs, int inputs, int first, int every, T* panels, int threads) {
  const int steps = steps_of<T>(inputs);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int panel = 0; panel < panels_of(outputs); panel++) {
    T* to = panels + (first + static_cast<size_t>(panel) * every) * steps * kPanelColumns * kStep<T>;
    for (int tile = 0; tile < kPanelTiles; tile++)
      for (int begin = 0; begin < steps; begin += kLanes) {
        const int elements = inputs - begin * kStep<T>;
        __m512i block[kLanes];
        for (int i = 0; i < kLanes; i++) {
          const int output = panel * kPanelColumns + tile * kLanes + i;
          const T* from = weights + static_cast<size_t>(output) * inputs + begin * kStep<T>;
          if (output >= outputs)
            block[i] = _mm512_setzero_si512();
          else if constexpr (sizeof(T) == 1)
            block[i] = _mm512_maskz_loadu_epi8(elements >= 64 ? ~0ull : (1ull << elements) - 1, from);
          else if constexpr (sizeof(T) == 2)
            block[i] = _mm512_maskz_loadu_epi16(elements >= 32 ? ~0u : (1u << elements) - 1, from);
          else
            block[i] = _mm512_maskz_loadu_epi32(lanes_below(elements), from);
        }
        transpose(block);
        for (int i = 0; i < std::min(kLanes, steps - begin); i++)
          _mm512_storeu_si512(to + (static_cast<size_t>(begin + i) * kPanelTiles + tile) * kLanes * kStep<T>, block[i]);
      }
  }
}

}  // namespace headrace

using namespace headrace;

extern "C" {

// A matrix has elements of `bytes`: float (4), bf16 (2), or whole numbers in 8 bits (1), 128 too high.

long headrace_packed_bytes(int outputs, int inputs, int bytes) {
  const int steps = bytes == 1 ? steps_of<uint8_t>(inputs) : bytes == 2 ? steps_of<bf16>(inputs) : steps_of<float>(inputs);
  return static_cast<long>(panels_of(outputs)) * kPanelColumns * steps * sizeof(int);
}

void headrace_pack(const void* weights, int outputs, int inputs, int bytes, int first, int every, void* panels,
                   int threads) {
  const auto pack_as = [&](auto element) {
    using T = decltype(element);
    pack(static_cast<const T*>(weights), outputs, inputs, first, every, static_cast<T*>(panels), threads);
  };
  if (bytes == 1)
    pack_as(uint8_t{});
  else if (bytes == 2)
    pack_as(bf16{});
  else
    pack_as(float{});
}

// `half` says that the model's elements are bf16 and not float.
Decoder* headrace_decoder(const Model* model, int half, int tokens_max, int threads) {
#ifdef __AVX512BF16__
  if (half) return new TypedDecoder<bf16>(*model, tokens_max, threads);
#endif
  return new TypedDecoder<float>(*model, tokens_max, threads);
}

void headrace_step(Decoder* decoder, const Batch* batch) { decoder->step(*batch); }

void headrace_free(Decoder* decoder) { delete decoder; }
}
