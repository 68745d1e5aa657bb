// Matrix arithmetic in vector code. This file is compiled with contraction: products of 16-bit and tf32 values are
// exact in f32 (but for products that are subnormal or overflow), so that a fused multiply-add rounds as two steps do.
#include "matmul.h"

namespace {
#ifdef __AVX512F__
constexpr u32 WIDTH = 16;
#else
constexpr u32 WIDTH = 8;
#endif
typedef f32 Vector __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
constexpr u32 ROWS = 4, VECTORS = 2;  // sums in registers: 8 of them hide the latency of the multiply-add

Vector& vector_at(f32* values) { return *(Vector*)values; }
const Vector& vector_at(const f32* values) { return *(const Vector*)values; }

void multiply_tile(f32* const* d, const f32* a, const f32* b, u32 column, u32 n, u32 k_count) {
  Vector sums[ROWS][VECTORS];
#pragma GCC unroll 4
  for (u32 r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (u32 v = 0; v < VECTORS; v++) sums[r][v] = vector_at(d[r] + column + v * WIDTH);
  for (u32 k = 0; k < k_count; k++)
#pragma GCC unroll 4
    for (u32 r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (u32 v = 0; v < VECTORS; v++)
        sums[r][v] += a[r * k_count + k] * vector_at(b + k * n + column + v * WIDTH);
#pragma GCC unroll 4
  for (u32 r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (u32 v = 0; v < VECTORS; v++) vector_at(d[r] + column + v * WIDTH) = sums[r][v];
}
}  // namespace

void multiply_add(f32* const* d, const f32* a, const f32* b, u32 rows, u32 n, u32 k_count) {
  for (u32 row = 0; row < rows; row += ROWS) {
    const f32* factors = a + row * k_count;
    u32 column = 0;
    for (; column + VECTORS * WIDTH <= n; column += VECTORS * WIDTH)
      multiply_tile(d + row, factors, b, column, n, k_count);
    for (u32 r = 0; r < ROWS; r++)
      for (u32 k = 0; k < k_count; k++)
        for (u32 c = column; c < n; c++) d[row + r][c] += factors[r * k_count + k] * b[k * n + c];
  }
}

void decode_chunk(const u8* bytes, u32 format, f32* out, u32 stride) {
  if (format == MATRIX_TF32) {
    u32 words[4];
    memcpy(words, bytes, 16);
    for (u32 e = 0; e < 4; e++) out[e * stride] = bit_cast<f32>(words[e] & 0xffffe000u);
    return;
  }
  u16 halves[8];
  memcpy(halves, bytes, 16);
  if (format == MATRIX_BF16)
    for (u32 e = 0; e < 8; e++) out[e * stride] = from_bf16(halves[e]);
  else
    for (u32 e = 0; e < 8; e++) out[e * stride] = from_f16(halves[e]);
}
