// The arithmetic of tcgen05.mma and wgmma, and the formats of their operands.
#pragma once
#include "numeric.h"

enum MatrixFormat : u32 { MATRIX_F16, MATRIX_BF16, MATRIX_TF32 };
constexpr u32 OPERAND_K_BYTES = 32;  // of K in one instruction, whatever the format
constexpr u32 OPERAND_K = 16;        // most values of K in one instruction
constexpr u32 MATRIX_MAX_N = 256;

// A matrix operand as floats: value (row, k) at row * row_stride + k * k_stride.
struct Operand { f32* values; u32 row_stride, k_stride; };

// 16 bytes of an operand along K (or, of an MN-major one, along its rows) to floats, `stride` apart.
void decode_chunk(const u8* bytes, u32 format, f32* out, u32 stride);

// d[row] += a * b for rows of n floats: a is rows x k_count, b is k_count x n. Each sum runs over k in ascending order.
void multiply_add(f32* const* d, const f32* a, const f32* b, u32 rows, u32 n, u32 k_count);
