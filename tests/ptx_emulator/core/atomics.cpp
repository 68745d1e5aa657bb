// Atomics and reductions, and the arithmetic of bulk reductions.
#include <algorithm>
#include "machine.h"

namespace {
enum AtomicOp { ADD, MIN, MAX, AND, OR, XOR, EXCHANGE, COMPARE_SWAP, INCREMENT, DECREMENT };
enum AtomicType { U32, S32, F32, U64, S64, B32, B64, BF16X2, F16X2, F64, BF16, F16 };

template <class T> T combine(u32 op, T old, T value, T other) {
  switch (op) {
    case ADD: return (T)(old + value);
    case MIN: return value < old ? value : old;
    case MAX: return value > old ? value : old;
    case EXCHANGE: return value;
    case COMPARE_SWAP: return old == value ? other : old;
    case INCREMENT: return old >= value ? T(0) : (T)(old + 1);
    case DECREMENT: return old == T(0) || old > value ? value : (T)(old - 1);
    default: return old;
  }
}
template <class T> T combine_bits(u32 op, T old, T value, T other) {
  if (op == AND) return old & value;
  if (op == OR) return old | value;
  if (op == XOR) return old ^ value;
  return combine(op, old, value, other);
}
u64 combine_any(u32 type, u32 op, u64 old, u64 value, u64 other) {
  switch (type) {
    case U32: case B32: return combine_bits<u32>(op, (u32)old, (u32)value, (u32)other);
    case S32: return (u32)combine_bits<s32>(op, (s32)old, (s32)value, (s32)other);
    case U64: case B64: return combine_bits<u64>(op, old, value, other);
    case S64: return (u64)combine_bits<s64>(op, (s64)old, (s64)value, (s64)other);
    case F32: return bit_cast<u32>(combine<f32>(op, low(old), low(value), low(other)));
    case F64: return bit_cast<u64>(combine<f64>(op, bit_cast<f64>(old), bit_cast<f64>(value), bit_cast<f64>(other)));
    default: {
      bool brain = type == BF16X2 || type == BF16;
      auto half = [&](u32 shift) {
        f32 a = brain ? from_bf16(old >> shift & 0xffff) : from_f16(old >> shift & 0xffff);
        f32 b = brain ? from_bf16(value >> shift & 0xffff) : from_f16(value >> shift & 0xffff);
        f32 r = op == ADD ? a + b : op == MIN ? min_number(a, b) : max_number(a, b);
        return (brain ? to_bf16(r) : to_f16(r)) << shift;
      };
      return type == BF16 || type == F16 ? half(0) : half(0) | half(16);
    }
  }
}
}  // namespace

u64 reduce_value(u32 type, u32 op, u64 old, u64 value) { return combine_any(type, op, old, value, 0); }

u8* Cta::atomic_place(Warp& w, u64 address, u32 bytes, bool shared) {
  Actor who = actor(w);
  who.atomic = true;
  check_aligned(address, bytes, shared ? SPACE_SHARED : SPACE_GLOBAL, "atomic");
  if (shared) {
    check_shared((u32)address, bytes, "atomic");
    check_shared_init((u32)address, bytes, "atomic", w.pc, agent_code(AGENT_WARP, w.id));
    shadow_shared((u32)address, bytes, true, who);
    return &shared_[address];
  }
  u8* place = global_pointer(address, bytes, "atomic");
  shadow_global(address, bytes, true, who);
  return place;
}

void Cta::atomic(Warp& w, const Instr& i, const s32* o, u32 m) {
  const u32 op = (u32)i.b & 255, type = (u32)i.c & 255, count = (u32)i.c >> 8;
  const bool wide = type == U64 || type == S64 || type == B64 || type == F64;
  const u32 size = wide ? 8 : type == BF16 || type == F16 ? 2 : 4;
  auto exclusive = launch.exclusive();
  u64 addresses[32];
  lane_addresses(w, o[0], i.imm, addresses);
  EACH_LANE(m) {
    const u64 address = addresses[lane];
    const bool shared = i.a == MEMORY_SHARED || (i.a == MEMORY_GENERIC && is_shared_window(address));
    // As an sm_90 card does: additions in global memory flush subnormal numbers, in shared memory and bulk ones do not.
    const bool flushes = type == F32 && op == ADD && !shared;
    u8* place = atomic_place(w, address, size * count, shared);
    for (u32 v = 0; v < count; v++) {
      auto value_of = [&](s32 slot) { return wide ? reg64(w, slot)[lane] : (u64)reg(w, slot)[lane]; };
      u64 old = 0;
      memcpy(&old, place + v * size, size);
      u64 other = op == COMPARE_SWAP ? value_of(o[1 + 2 * count]) : 0;
      const u64 value = value_of(o[1 + count + v]);
      u64 result = flushes ? bit_cast<u32>(flush(flush(low(old)) + flush(low(value))))
                           : combine_any(type, op, old, value, other);
      memcpy(place + v * size, &result, size);
      if (o[1 + v] >= 0) {
        if (wide) reg64(w, o[1 + v])[lane] = old;
        else reg(w, o[1 + v])[lane] = (u32)old;
      }
    }
  }
  progress++;
}
