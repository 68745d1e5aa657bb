// Number formats and the bit instructions that no C operator expresses.
#pragma once
#include <cmath>
#include <limits>
#include "common.h"

template <class To, class From> inline To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  memcpy(&result, &value, sizeof result);
  return result;
}
inline f32 from_bf16(u32 a) { return bit_cast<f32>(a << 16); }
inline u32 to_bf16(f32 value) {
  u32 x = bit_cast<u32>(value);
  if ((x & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (x + 0x7fff + ((x >> 16) & 1)) >> 16;
}
inline f32 from_f16(u32 a) {
  u32 sign = (a & 0x8000) << 16, exponent = (a >> 10) & 31, mantissa = a & 1023;
  if (exponent == 31) return bit_cast<f32>(sign | 0x7f800000u | mantissa << 13);
  if (exponent) return bit_cast<f32>(sign | (exponent + 112) << 23 | mantissa << 13);
  f32 magnitude = (f32)mantissa * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}
inline u32 to_f16(f32 value) {
  u32 x = bit_cast<u32>(value), sign = (x >> 16) & 0x8000, magnitude = x & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00;  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {                       // subnormal: the float addition rounds to even
    f32 shifted = bit_cast<f32>(magnitude) + 0.5f;
    return sign | (bit_cast<u32>(shifted) - 0x3f000000u);
  }
  return sign | ((magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000u) >> 13);
}
inline u32 to_tf32(f32 value) {  // round to nearest, ties away, as cvt.rna
  u32 x = bit_cast<u32>(value);
  return ((x & 0x7f800000u) == 0x7f800000u ? x : x + 0x1000) & 0xffffe000u;
}
inline f32 fma_half(f32 a, f32 b, f32 c) { return (f32)((f64)a * b + c); }
inline f32 flush(f32 value) {
  u32 x = bit_cast<u32>(value);
  return x & 0x7f800000u ? value : bit_cast<f32>(x & 0x80000000u);
}
inline f32 relu(f32 a) { return a > 0 ? a : a != a ? a : 0.f; }
inline f32 low(u64 a) { return bit_cast<f32>((u32)a); }
inline f32 high(u64 a) { return bit_cast<f32>((u32)(a >> 32)); }
inline u64 pair(f32 a, f32 b) { return (u64)bit_cast<u32>(a) | (u64)bit_cast<u32>(b) << 32; }

template <class T, class F> inline T saturate(F value) {
  // A NaN becomes 0, or the top bit if source or result has 64 bits: what an sm_90 card gives.
  if (value != value) return sizeof(T) == 8 || sizeof(F) == 8 ? T(1) << (sizeof(T) * 8 - 1) : 0;
  constexpr f64 below = (f64)std::numeric_limits<T>::min();
  constexpr f64 above = 2.0 * (f64)(T(1) << (std::numeric_limits<T>::digits - 1));  // max() + 1, exact in f64
  if ((f64)value <= below) return std::numeric_limits<T>::min();
  if ((f64)value >= above) return std::numeric_limits<T>::max();
  return (T)value;
}
// min and max of PTX: a NaN operand yields the other one, and -0 is below +0.
inline f32 min_number(f32 a, f32 b) {
  if (a != a) return b != b ? bit_cast<f32>(0x7fffffffu) : b;
  if (b != b) return a;
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}
inline f32 max_number(f32 a, f32 b) {
  if (a != a) return b != b ? bit_cast<f32>(0x7fffffffu) : b;
  if (b != b) return a;
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}
inline f32 min_number_nan(f32 a, f32 b) { return a != a || b != b ? bit_cast<f32>(0x7fffffffu) : min_number(a, b); }
inline f32 max_number_nan(f32 a, f32 b) { return a != a || b != b ? bit_cast<f32>(0x7fffffffu) : max_number(a, b); }

// a + b rounded towards an infinity: the error of the nearest sum is exact (two-sum), its sign says where to go.
inline f32 add_directed(f32 a, f32 b, f32 direction) {
  volatile f32 sum = a + b;
  if (!std::isfinite(sum)) {
    // Rounding towards the other infinity, a finite sum never overflows.
    const bool overflow = std::isfinite(a) && std::isfinite(b) && (sum > 0) != (direction > 0);
    return overflow ? std::copysign(std::numeric_limits<f32>::max(), sum) : sum;
  }
  volatile f32 part = sum - a;
  volatile f32 error = (a - (sum - part)) + (b - part);
  if (direction < 0 ? error < 0 : error > 0) return nextafterf(sum, direction);
  if (sum == 0 && error == 0 && direction < 0 && (std::signbit(a) || std::signbit(b))) return -0.0f;
  return sum;
}
inline u32 permute_bytes(u32 a, u32 b, u32 selector) {
  u64 bytes = (u64)a | (u64)b << 32;
  u32 result = 0;
  for (int i = 0; i < 4; i++) {
    u32 nibble = (selector >> (4 * i)) & 15, byte = (bytes >> (8 * (nibble & 7))) & 255;
    if (nibble & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}
inline u32 logic3(u32 a, u32 b, u32 c, u32 table) {
  u32 result = 0;
  for (int i = 0; i < 8; i++)
    if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return result;
}
inline u32 extract_bits(u32 a, u32 position, u32 length) {
  position &= 255, length &= 255;
  if (position > 31 || !length) return 0;
  u32 shifted = a >> position;
  return length > 31 ? shifted : shifted & ((1u << length) - 1);
}
inline u32 extract_signed_bits(u32 a, u32 position, u32 length) {
  position &= 255, length &= 255;
  if (!length) return 0;
  u32 top = position + length - 1 > 31 ? 31 : position + length - 1, sign = a >> top & 1, result = 0;
  for (u32 i = 0; i < 32; i++) {
    u32 bit = i < length && position + i <= 31 ? a >> (position + i) & 1 : sign;
    result |= bit << i;
  }
  return result;
}
inline u32 insert_bits(u32 a, u32 b, u32 position, u32 length) {
  position &= 255, length &= 255;
  u32 result = b;
  for (u32 i = 0; i < length && position + i <= 31; i++) {
    u32 bit = 1u << (position + i);
    result = (result & ~bit) | ((a >> i & 1) ? bit : 0);
  }
  return result;
}
inline u64 extract_wide_bits(u64 a, u32 position, u32 length) {
  position &= 255, length &= 255;
  if (position > 63 || !length) return 0;
  u64 shifted = a >> position;
  return length > 63 ? shifted : shifted & ((1ull << length) - 1);
}
inline u64 insert_wide_bits(u64 a, u64 b, u32 position, u32 length) {
  position &= 255, length &= 255;
  if (position > 63 || !length) return b;
  u64 mask = (length > 63 ? ~0ull : (1ull << length) - 1) << position;
  return (b & ~mask) | (a << position & mask);
}
inline u32 reverse_bits(u32 a) {
  u32 result = 0;
  for (int i = 0; i < 32; i++) result |= (a >> i & 1) << (31 - i);
  return result;
}
inline u32 find_nth_set(u32 mask, u32 base, s32 offset) {
  if (offset == 0) return base < 32 && mask >> base & 1 ? base : ~0u;
  s32 step = offset > 0 ? 1 : -1, wanted = offset > 0 ? offset : -offset;
  for (s32 i = (s32)base; i >= 0 && i < 32; i += step)
    if ((mask >> i & 1) && --wanted == 0) return (u32)i;
  return ~0u;
}
