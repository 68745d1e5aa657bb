// Matrix instructions of SM90 and before: ldmatrix, stmatrix, movmatrix, mma.sync, wgmma.
#include "machine.h"

namespace {
enum { TYPE_BF16, TYPE_F16, TYPE_TF32 };
f32 half_of(u32 word, u32 part, s32 type) {
  u32 bits = word >> (16 * part) & 0xffff;
  return type == TYPE_BF16 ? from_bf16(bits) : from_f16(bits);
}
f32 tf32_of(u32 word) { return bit_cast<f32>(word & 0xffffe000u); }
}  // namespace

// Row r of matrix k is at the address that lane 8k + r gives; thread t holds elements 2(t%4) and 2(t%4)+1 of row t/4.
void Cta::load_matrix(Warp& w, const Instr& i, const s32* o, u32 m) {
  (void)m;
  u16 matrices[4][8][8];
  for (s32 k = 0; k < i.a; k++)
    for (u32 row = 0; row < 8; row++) {
      u32 address = shared_address(w, o[0], (u32)k * 8 + row, i.imm);
      if (address % 16) fault_at("misaligned", SPACE_SHARED, address, "ldmatrix row not at a multiple of 16 B");
      check_shared(address, 16, "ldmatrix");
      check_shared_init(address, 16, "ldmatrix", w.pc, agent_code(AGENT_WARP, w.id));
      shadow_shared(address, 16, false, actor(w));
      memcpy(matrices[k][row], &shared_[address], 16);
    }
  for (s32 k = 0; k < i.a; k++) {
    if (o[1 + k] < 0) continue;
    for (u32 t = 0; t < 32; t++) {
      u32 row = t / 4, column = t % 4 * 2;
      u32 first = i.b ? matrices[k][column][row] : matrices[k][row][column];
      u32 second = i.b ? matrices[k][column + 1][row] : matrices[k][row][column + 1];
      reg(w, o[1 + k])[t] = first | second << 16;
    }
  }
}

void Cta::store_matrix(Warp& w, const Instr& i, const s32* o, u32 m) {
  (void)m;
  for (s32 k = 0; k < i.a; k++) {
    u16 matrix[8][8];
    for (u32 t = 0; t < 32; t++) {
      u32 row = t / 4, column = t % 4 * 2, value = reg(w, o[1 + k])[t];
      (i.b ? matrix[column][row] : matrix[row][column]) = (u16)value;
      (i.b ? matrix[column + 1][row] : matrix[row][column + 1]) = (u16)(value >> 16);
    }
    for (u32 row = 0; row < 8; row++) {
      u32 address = shared_address(w, o[0], (u32)k * 8 + row, i.imm);
      if (address % 16) fault_at("misaligned", SPACE_SHARED, address, "stmatrix row not at a multiple of 16 B");
      check_shared(address, 16, "stmatrix");
      shadow_shared(address, 16, true, actor(w));
      memset(&shared_init_[address], 1, 16);
      memcpy(&shared_[address], matrix[row], 16);
    }
  }
  progress++;
}

void Cta::move_matrix(Warp& w, const s32* o, u32 m) {
  (void)m;
  u32 source[32];
  memcpy(source, reg(w, o[1]), sizeof source);
  auto element = [&](u32 row, u32 column) { return source[row * 4 + column / 2] >> (16 * (column & 1)) & 0xffff; };
  for (u32 t = 0; t < 32; t++)
    reg(w, o[0])[t] = element(t % 4 * 2, t / 4) | element(t % 4 * 2 + 1, t / 4) << 16;
}

// Fragments of m16n8: with g = t/4 and q = t%4, thread t holds D at rows g and g+8, columns 2q and 2q+1.
void Cta::multiply_warp(Warp& w, const Instr& i, const s32* o, u32 m) {
  (void)m;
  const u32 k_count = (u32)i.b;
  const bool tf32 = i.a == TYPE_TF32;
  const u32 a_registers = tf32 ? k_count / 2 : k_count / 4, b_registers = a_registers / 2;
  f32 a[16][16], b[16][8], d[16][8];
  for (u32 t = 0; t < 32; t++) {
    const u32 g = t / 4, q = t % 4;
    for (u32 r = 0; r < a_registers; r++) {
      u32 word = reg(w, o[4 + r])[t], row = g + (r & 1) * 8;
      if (tf32) a[row][q + (r >> 1) * 4] = tf32_of(word);
      else for (u32 e = 0; e < 2; e++) a[row][2 * q + e + (r >> 1) * 8] = half_of(word, e, i.a);
    }
    for (u32 r = 0; r < b_registers; r++) {
      u32 word = reg(w, o[4 + a_registers + r])[t];
      if (tf32) b[q + r * 4][g] = tf32_of(word);
      else for (u32 e = 0; e < 2; e++) b[2 * q + e + r * 8][g] = half_of(word, e, i.a);
    }
    for (u32 r = 0; r < 4; r++)
      d[g + (r >> 1) * 8][2 * q + (r & 1)] = bit_cast<f32>(reg(w, o[4 + a_registers + b_registers + r])[t]);
  }
  for (u32 row = 0; row < 16; row++)
    for (u32 k = 0; k < k_count; k++)
      for (u32 column = 0; column < 8; column++) d[row][column] += a[row][k] * b[k][column];
  for (u32 t = 0; t < 32; t++)
    for (u32 r = 0; r < 4; r++)
      reg(w, o[r])[t] = bit_cast<u32>(d[t / 4 + (r >> 1) * 8][2 * (t % 4) + (r & 1)]);
}

// Each warp computes its own 16 of the 64 rows when it issues; the result counts as unfinished until the wait.
void Cta::run_wgmma(Warp& w, const Instr& i, const s32* o, u32 m) {
  (void)m;
  const u32 n = (u32)i.b, registers = n / 2, format = i.a == TYPE_TF32 ? 2 : i.a == TYPE_BF16 ? 1 : 0;
  const bool from_registers = i.c & 1, a_transposed = i.c & 2, b_transposed = i.c & 4;
  const u32 k_count = format == 2 ? 8 : 16;
  const s32 *b_operand = o + registers, *enable = b_operand + 1, *a_operand = b_operand + 2;
  if (w.id / 4 * 4 + 3 >= warps_count) FAULT("not-modelled", "wgmma by an incomplete warpgroup");
  AsyncOp op{Work::MMA};
  op.pc = w.pc, op.warp = w.id;
  std::tie(op.agent, op.clock) = begin_async(AGENT_WGMMA, w.id, w.view);
  if (!checks(CHECK_RACES)) op.agent = tensor_pipe(w.id);  // a place for the view; it is not used
  pipes_[op.agent] = w.view;
  f32 a[64 * 16], b[256 * 16];
  if (from_registers) {
    for (u32 t = 0; t < 32; t++)
      for (u32 r = 0; r < 4; r++) {
        u32 word = reg(w, a_operand[r])[t], row = w.id % 4 * 16 + t / 4 + (r & 1) * 8;
        if (format == 2) a[row * k_count + t % 4 + (r >> 1) * 4] = tf32_of(word);
        else
          for (u32 e = 0; e < 2; e++) a[row * k_count + 2 * (t % 4) + e + (r >> 1) * 8] = half_of(word, e, i.a);
      }
  } else {
    read_operand(a, reg64(w, a_operand[0])[0], 64, a_transposed, format, op);
  }
  read_operand(b, reg64(w, b_operand[0])[0], n, b_transposed, format, op);
  bool accumulate = *enable == ALWAYS_TRUE || (*enable >= 0 && (w.predicates[*enable] & 1));
  for (u32 t = 0; t < 32; t++)
    for (u32 r = 0; r < registers; r++) {
      u32 row = w.id % 4 * 16 + t / 4 + (r >> 1 & 1) * 8, column = r / 4 * 8 + 2 * (t % 4) + (r & 1);
      f32 sum = accumulate ? bit_cast<f32>(reg(w, o[r])[t]) : 0.f;
      for (u32 k = 0; k < k_count; k++) sum += a[row * k_count + k] * b[column * k_count + k];
      reg(w, o[r])[t] = bit_cast<u32>(sum);
    }
  launch.stats.mma++;
  Warp::PendingWgmma pending{op.agent, op.clock, w.wgmma_group, {}};
  pending.registers.assign(o, o + registers);
  w.pending_wgmma.push_back(std::move(pending));
  progress++;
}

void Cta::wait_wgmma(Warp& w, const Instr& i) {
  std::vector<Warp::PendingWgmma> kept;
  for (auto& pending : w.pending_wgmma)
    if ((s64)pending.group < (s64)w.wgmma_group - i.a) w.view.set_both(pending.agent, pending.clock);
    else kept.push_back(std::move(pending));
  w.pending_wgmma.swap(kept);
}
