// Instructions that move values between lanes, or between registers of different widths.
#include "machine.h"

u32 Cta::uniform(Warp& w, s32 slot, u32 m, const char* what) {
  const u32* values = reg(w, slot);
  u32 first = values[first_lane(m)];
  EACH_LANE(m) if (values[lane] != first) FAULT("divergence", "%s differs between the lanes of a warp", what);
  return first;
}

u64 Cta::uniform64(Warp& w, s32 slot, const char* what) {
  const u64* values = reg64(w, slot);
  for (u32 lane = 1; lane < 32; lane++)
    if (values[lane] != values[0]) FAULT("divergence", "%s differs between the lanes of a warp", what);
  return values[0];
}

void Cta::shuffle(Warp& w, const Instr& i, const s32* o, u32 m) {
  enum { IDX, BFLY, UP, DOWN };
  u32 result[32];
  u32 valid = 0;
  EACH_LANE(m) {
    u32 b = reg(w, o[3])[lane], clamp = reg(w, o[4])[lane];
    u32 segment = clamp >> 8 & 31, limit = clamp & 31, last = (lane & segment) | (limit & ~segment);
    s32 from;
    bool ok;
    if (i.a == IDX) { from = (s32)((lane & segment) | (b & ~segment & 31)); ok = (u32)from <= last; }
    else if (i.a == BFLY) { from = (s32)(lane ^ (b & 31)); ok = (u32)from <= last; }
    else if (i.a == UP) { from = (s32)lane - (s32)(b & 31); ok = from >= (s32)last; }
    else { from = (s32)(lane + (b & 31)); ok = (u32)from <= last; }
    if (ok && !(m >> from & 1)) FAULT("divergence", "shfl.sync reads lane %d, which does not take part", from);
    result[lane] = reg(w, o[2])[ok ? (u32)from : lane];
    if (ok) valid |= 1u << lane;
  }
  if (o[0] >= 0) EACH_LANE(m) reg(w, o[0])[lane] = result[lane];
  if (o[1] >= 0) w.predicates[o[1]] = (w.predicates[o[1]] & ~m) | valid;
}

void Cta::run_vote(Warp& w, const Instr& i, const s32* o, u32 m) {
  enum { ALL, ANY, UNI, BALLOT };
  u32 truth = (i.b ? ~w.predicates[o[1]] : w.predicates[o[1]]) & m;
  if (i.a == BALLOT) {
    if (o[0] >= 0) EACH_LANE(m) reg(w, o[0])[lane] = truth;
    return;
  }
  bool value = i.a == ALL ? truth == m : i.a == ANY ? truth != 0 : truth == m || truth == 0;
  if (o[0] >= 0) w.predicates[o[0]] = (w.predicates[o[0]] & ~m) | (value ? m : 0);
}

void Cta::match(Warp& w, const Instr& i, const s32* o, u32 m) {
  u32 equal[32];
  EACH_LANE(m) {
    equal[lane] = 0;
    for (u32 k = 0; k < 32; k++) {
      bool same = i.a == 8 ? reg64(w, o[1])[k] == reg64(w, o[1])[lane] : reg(w, o[1])[k] == reg(w, o[1])[lane];
      if ((m >> k & 1) && same) equal[lane] |= 1u << k;
    }
  }
  EACH_LANE(m) reg(w, o[0])[lane] = equal[lane];
}

void Cta::reduce_lanes(Warp& w, const Instr& i, const s32* o, u32 m) {
  enum { ADD, MIN, MAX, AND, OR, XOR };
  u32 sum = reg(w, o[1])[first_lane(m)];
  EACH_LANE(m & (m - 1)) {
    u32 v = reg(w, o[1])[lane];
    bool below = i.b ? (s32)v < (s32)sum : v < sum;
    sum = i.a == ADD   ? sum + v
          : i.a == AND ? sum & v
          : i.a == OR  ? sum | v
          : i.a == XOR ? sum ^ v
          : (i.a == MIN) == below ? v
                                  : sum;
  }
  EACH_LANE(m) reg(w, o[0])[lane] = sum;
}

void Cta::select(Warp& w, const Instr& i, const s32* o, u32 m) {
  const u32 p = w.predicates[o[3]];
  if (i.a == 8) {
    u64 *to = reg64(w, o[0]), *yes = reg64(w, o[1]), *no = reg64(w, o[2]);
    for (u32 lane = 0; lane < 32; lane++) to[lane] = !(m >> lane & 1) ? to[lane] : p >> lane & 1 ? yes[lane] : no[lane];
  } else {
    u32 *to = reg(w, o[0]), *yes = reg(w, o[1]), *no = reg(w, o[2]);
    for (u32 lane = 0; lane < 32; lane++) to[lane] = !(m >> lane & 1) ? to[lane] : p >> lane & 1 ? yes[lane] : no[lane];
  }
}

// mov.b64 and mov.b32 of a vector of i.a bytes each.
void Cta::pack(Warp& w, const Instr& i, const s32* o, u32 m) {
  u64 values[32] = {};
  const u64 part_mask = (1ull << (8 * i.a)) - 1;
  for (s32 k = i.count - 1; k >= 1; k--) {
    const u32* parts = reg(w, o[k]);
    for (u32 lane = 0; lane < 32; lane++) values[lane] = values[lane] << (8 * i.a) | (parts[lane] & part_mask);
  }
  if (i.b == 8) {
    u64* to = reg64(w, o[0]);
    for (u32 lane = 0; lane < 32; lane++) to[lane] = m >> lane & 1 ? values[lane] : to[lane];
  } else {
    u32* to = reg(w, o[0]);
    for (u32 lane = 0; lane < 32; lane++) to[lane] = m >> lane & 1 ? (u32)values[lane] : to[lane];
  }
}

void Cta::unpack(Warp& w, const Instr& i, const s32* o, u32 m) {
  u64 values[32];
  const u64 part_mask = (1ull << (8 * i.a)) - 1;
  if (i.b == 8) memcpy(values, reg64(w, o[0]), sizeof values);
  else for (u32 lane = 0; lane < 32; lane++) values[lane] = reg(w, o[0])[lane];
  for (s32 k = 1; k < i.count; k++) {
    if (o[k] < 0) continue;
    u32* to = reg(w, o[k]);
    const u32 shift = 8 * (u32)i.a * (u32)(k - 1);
    for (u32 lane = 0; lane < 32; lane++) to[lane] = m >> lane & 1 ? (u32)(values[lane] >> shift & part_mask) : to[lane];
  }
}
