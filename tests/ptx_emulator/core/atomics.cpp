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
// Two additions of bf16, what gradients are summed by.
u32 add_pair(u32 old, u32 value) {
  return to_bf16(from_bf16(old & 0xffff) + from_bf16(value & 0xffff)) |
         to_bf16(from_bf16(old >> 16) + from_bf16(value >> 16)) << 16;
}
u64 combine_any(u32 type, u32 op, u64 old, u64 value, u64 other) {
  if (type == BF16X2 && op == ADD) return add_pair((u32)old, (u32)value);
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

// Checks of an atomic by several lanes; `places` gets where the data lies. Returns the lanes that access shared memory.
u32 Cta::access_atomic(Warp& w, s32 space, const u64* addresses, u32 m, u32 bytes, u8** places) {
  u32 shared = space == MEMORY_SHARED ? m : 0;
  if (space == MEMORY_GENERIC) EACH_LANE(m) shared |= (u32)is_shared_window(addresses[lane]) << lane;
  EACH_LANE(m) {
    const bool here = shared >> lane & 1;
    check_aligned(addresses[lane], bytes, here ? SPACE_SHARED : SPACE_GLOBAL, "atomic");
    if (here) check_shared((u32)addresses[lane], bytes, "atomic");
    places[lane] = here ? &shared_[addresses[lane]] : global_pointer(addresses[lane], bytes, "atomic");
  }
  Actor who = actor(w);
  who.atomic = true;
  each_run(addresses, shared, bytes, [&](u64 address, u32 length) {
    check_shared_init((u32)address, length, "atomic", w.pc, agent_code(AGENT_WARP, w.id));
    shadow_shared((u32)address, length, true, who);
  });
  each_run(addresses, m & ~shared, bytes, [&](u64 address, u32 length) { shadow_global(address, length, true, who); });
  return shared;
}

void Cta::atomic(Warp& w, const Instr& i, const s32* o, u32 m) {
  const u32 op = (u32)i.b & 255, type = (u32)i.c & 255, count = (u32)i.c >> 8;
  const bool wide = type == U64 || type == S64 || type == B64 || type == F64;
  const u32 size = wide ? 8 : type == BF16 || type == F16 ? 2 : 4;
  u64 addresses[32];
  u8* places[32];
  lane_addresses(w, o[0], i.imm, addresses);
  const u32 shared = access_atomic(w, i.a, addresses, m, size * count, places);
  auto exclusive = launch.exclusive();
  EACH_LANE(m)
    for (u32 v = 0; v < count; v++) {
      auto value_of = [&](s32 slot) { return wide ? reg64(w, slot)[lane] : (u64)reg(w, slot)[lane]; };
      // As an sm_90 card does: additions in global memory flush subnormal numbers, in shared memory and bulk ones do not.
      const bool flushes = type == F32 && op == ADD && !(shared >> lane & 1);
      u64 old = 0;
      memcpy(&old, places[lane] + v * size, size);
      u64 other = op == COMPARE_SWAP ? value_of(o[1 + 2 * count]) : 0;
      const u64 value = value_of(o[1 + count + v]);
      u64 result = flushes ? bit_cast<u32>(flush(flush(low(old)) + flush(low(value))))
                           : combine_any(type, op, old, value, other);
      memcpy(places[lane] + v * size, &result, size);
      if (o[1 + v] < 0) continue;
      if (wide) reg64(w, o[1 + v])[lane] = old;
      else reg(w, o[1 + v])[lane] = (u32)old;
    }
  progress++;
}

void Cta::reduce_global(u8* target, const u8* source, u32 bytes, u32 type, u32 op) {
  auto exclusive = launch.exclusive();
  static const u32 sizes[] = {4, 4, 4, 8, 8, 4, 8, 4, 4, 8, 2, 2};
  for (u32 at = 0; at < bytes; at += sizes[type]) {
    u64 old = 0, value = 0;
    memcpy(&old, target + at, sizes[type]);
    memcpy(&value, source + at, sizes[type]);
    const u64 result = combine_any(type, op, old, value, 0);
    memcpy(target + at, &result, sizes[type]);
  }
}
