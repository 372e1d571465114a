// Sixteen lanes of AVX-512, and the two element types that weights, activations and the cache have: bf16 and float.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

namespace headrace {

constexpr int kLanes = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

using bf16 = uint16_t;

// Memory whose vectors never straddle two cache lines: such loads cost twice.
template <class T>
struct LineAllocator {
  using value_type = T;
  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64))); }
  void deallocate(T* memory, size_t) { ::operator delete(memory, std::align_val_t(64)); }
  template <class U>
  bool operator==(const LineAllocator<U>&) const { return true; }
  template <class U>
  bool operator!=(const LineAllocator<U>&) const { return false; }
};

template <class T>
using Buffer = std::vector<T, LineAllocator<T>>;

inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

inline __mmask16 lanes_below(int count) {
  return count >= kLanes ? 0xffff : static_cast<__mmask16>((1u << (count < 0 ? 0 : count)) - 1);
}

// A product advances in steps of one dword of each row: two bf16 or one float.
template <class T>
constexpr int kStep = sizeof(float) / sizeof(T);

template <class T>
inline int steps_of(int elements) {
  return (elements + kStep<T> - 1) / kStep<T>;
}

template <class T>
inline __m512 accumulate(__m512 sum, __m512i x, __m512i w);

template <>
inline __m512 accumulate<float>(__m512 sum, __m512i x, __m512i w) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(w), sum);
}

#ifdef __AVX512BF16__
template <>
inline __m512 accumulate<bf16>(__m512 sum, __m512i x, __m512i w) {
  return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
}

inline void store(bf16* to, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x));
}

inline void store(bf16* to, __m512 x, __mmask16 mask) {
  _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(x));
}
#endif

inline void store(float* to, __m512 x) { _mm512_storeu_ps(to, x); }

inline void store(float* to, __m512 x, __mmask16 mask) { _mm512_mask_storeu_ps(to, mask, x); }

inline __m512 load(const bf16* from, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

inline __m512 load(const float* from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }

// e^x to about one unit in the last place; exactly 0 below the range of normal floats, so a mask of -inf leaves nothing.
inline __m512 exp(__m512 x) {
  const __mmask16 in_range = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3f), _CMP_GE_OQ);
  x = _mm512_min_ps(x, _mm512_set1_ps(88.7f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);  // coefficients of Cephes' expf
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_maskz_scalef_ps(in_range, p, n);
}

// For permutex2var: elements first, first + 1, ... of two vectors of sixteen-bit elements in turn.
inline __m512i interleaved(int first) {
  const __m512i lanes = _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                         _mm512_set1_epi32(first));
  return _mm512_or_si512(lanes, _mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(32)), 16));
}

// Rows of dwords become columns: out[c] holds dword c of each of the 16 rows.
inline void transpose(__m512i rows[kLanes]) {
  __m512i pairs[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  __m512i fours[kLanes];
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4) {
    fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512i a = _mm512_shuffle_i32x4(fours[i], fours[4 + i], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(fours[8 + i], fours[12 + i], 0x88);
    const __m512i c = _mm512_shuffle_i32x4(fours[i], fours[4 + i], 0xdd);
    const __m512i d = _mm512_shuffle_i32x4(fours[8 + i], fours[12 + i], 0xdd);
    rows[i] = _mm512_shuffle_i32x4(a, b, 0x88);
    rows[8 + i] = _mm512_shuffle_i32x4(a, b, 0xdd);
    rows[4 + i] = _mm512_shuffle_i32x4(c, d, 0x88);
    rows[12 + i] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
}

}  // namespace headrace
