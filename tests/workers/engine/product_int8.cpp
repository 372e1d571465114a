// The kernels' product in 8 bits, for the test of its arithmetic.
#include <omp.h>

#include "product.h"

using namespace headrace;

// `rows` [count, stride], zeros beyond `inputs`, times a packed matrix: `out` [count, whole panels].
extern "C" void product_int8(const float* rows, int count, int stride, const void* panels, const float* scales, int outputs,
                             int inputs, float* out, int threads) {
  const Matrix matrix{panels, scales, nullptr, outputs, inputs};
  Buffer<int8_t> numbers(static_cast<size_t>(count) * stride);
  std::vector<Group> groups(numbers.size() / kGroup);
  for (int row = 0; row < count; row++)
    quantise_groups(rows + row * stride, inputs, &numbers[row * stride], &groups[row * (stride / kGroup)]);
  const int columns = panels_of(outputs) * kPanelColumns;
  Team team(1);
  team.gather();
#pragma omp parallel num_threads(threads)
  {
    Member member(team, omp_get_thread_num());
    const Numbers x{numbers.data(), static_cast<size_t>(stride), groups.data()};
    product(member, x, count, matrix, [&](int row, auto size, int column, auto& sums) {
      for (int r = 0; r < size; r++)
        for (int t = 0; t < kPanelTiles; t++)
          _mm512_storeu_ps(out + static_cast<size_t>(row + r) * columns + column + t * kLanes, sums[r][t]);
    });
  }
}
