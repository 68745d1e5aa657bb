// Matrix instructions of SM90 and before: ldmatrix, stmatrix, movmatrix, mma.sync, wgmma.
#include "machine.h"

namespace {
enum { TYPE_BF16, TYPE_F16, TYPE_TF32 };
constexpr u32 WGMMA_ROWS = 64;
f32 half_of(u32 word, u32 part, s32 type) {
  u32 bits = word >> (16 * part) & 0xffff;
  return type == TYPE_BF16 ? from_bf16(bits) : from_f16(bits);
}
f32 tf32_of(u32 word) { return bit_cast<f32>(word & 0xffffe000u); }
}  // namespace

// Row r of matrix k is at the address that lane 8k + r gives; thread t holds elements 2(t%4) and 2(t%4)+1 of row t/4.
void Cta::load_matrix(Warp& w, const Instr& i, const s32* o, u32 m) {
  (void)m;
  w.touched = ~0u;
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
  w.touched = ~0u;
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

// wgmma is one operation of four warps. It runs at some time after the last of them has issued it, reads its registers
// then, and is complete for a warp at its wgmma.wait_group. The reads of shared memory are those of one agent for the
// warpgroup: an arrival by one of its threads after the wait tells the producer that the stage is free, as CUTLASS does.
void Cta::issue_wgmma(Warp& w, const Instr& i, const s32* o) {
  const u32 registers = (u32)i.b / 2, group = w.id / 4, place = w.wgmma_issued - warpgroups_[group].complete;
  const s32 *b_operand = o + registers, *enable = b_operand + 1, *a_operand = b_operand + 2;
  if (group * 4 + 3 >= warps_count) FAULT("not-modelled", "wgmma by an incomplete warpgroup");
  AsyncOp op{Work::WGMMA};
  op.pc = w.pc, op.warp = group * 4;
  op.accumulate = *enable == ALWAYS_TRUE || (*enable >= 0 && (w.predicates[*enable] & 1));
  op.b = uniform64(w, *b_operand, "wgmma descriptor");
  op.a = i.c & 1 ? 0 : uniform64(w, *a_operand, "wgmma descriptor");
  check_wgmma_operands(w, i, o, op.accumulate);
  w.wgmma_issued++;
  Warpgroup& warpgroup = warpgroups_[group];
  if (place == warpgroup.issuing.size()) {
    if (checks(CHECK_RACES)) op.view = w.view;
    warpgroup.issuing.push_back(std::move(op));
    warpgroup.arrived.push_back(1u << w.id % 4);
  } else {
    AsyncOp& first = warpgroup.issuing[place];
    if (first.pc != op.pc || first.a != op.a || first.b != op.b || first.accumulate != op.accumulate)
      FAULT("divergence", "wgmma that differs from the one of other warps of its warpgroup, {pc %d}", first.pc);
    if (checks(CHECK_RACES)) first.view.meet(w.view);
    warpgroup.arrived[place] |= 1u << w.id % 4;
  }
  while (!warpgroup.arrived.empty() && warpgroup.arrived[0] == 15) {
    AsyncOp ready = std::move(warpgroup.issuing[0]);
    warpgroup.issuing.pop_front();
    warpgroup.arrived.pop_front();
    warpgroup.complete++;
    issue(std::move(ready));
  }
  progress++;
  tick(w);
}

// The registers of a wgmma when a warp issues it: initialised, fenced, and not in flight other than as accumulators of
// the same shape.
void Cta::check_wgmma_operands(Warp& w, const Instr& i, const s32* o, bool accumulate) {
  const u32 n = (u32)i.b, registers = n / 2;
  const s32 agent = agent_code(AGENT_WARP, w.id);
  if (checks(CHECK_INIT))
    for (u32 r = 0; r < registers; r++) {
      u32& init = w.register_init[(u32)o[r] >> 7];
      if (accumulate && ~init)
        report("uninitialised-register", w.pc, agent, -1, -1, SPACE_NONE, 0, "accumulator that nothing has written");
      init = ~0u;
    }
  if (!checks(CHECK_RACES)) return;
  const char* fence = nullptr;
  const char* wait = nullptr;
  if (!w.wgmma_fences) fence = "no wgmma.fence before the first wgmma";
  auto watch = [&](s32 slot) -> Warp::WgmmaRegister& {
    auto& state = w.wgmma_registers[(u32)slot >> 7];
    if (state.touched == w.wgmma_fences + 1) fence = "register accessed since the last wgmma.fence";
    return state;
  };
  const u32 number = w.wgmma_issued + 1;
  if (i.c & 1)
    for (u32 r = 0; r < 4; r++) {
      auto& state = watch(o[registers + 2 + r]);
      if (state.accumulating > w.wgmma_done) wait = "A is the accumulator of a wgmma that was not waited for";
      state.feeding = number;
    }
  for (u32 r = 0; r < registers; r++) {
    auto& state = watch(o[r]);
    if (state.feeding > w.wgmma_done) wait = "accumulator is A of a wgmma that was not waited for";
    if (state.accumulating > w.wgmma_done && state.n != n) fence = "accumulator of a wgmma of another shape in flight";
    state.accumulating = number, state.n = n;
  }
  if (fence) report("missing-wgmma-fence", w.pc, agent, -1, -1, SPACE_NONE, 0, fence);
  if (wait) report("wgmma-not-waited", w.pc, agent, -1, -1, SPACE_NONE, 0, wait);
}

// Any other instruction: registers that a wgmma in flight writes are not to be touched, those it reads not written.
void Cta::check_wgmma_registers(Warp& w, const Instr& i, const s32* o) {
  if (i.kind == KIND_WGMMA) return;
  const u8* roles = &launch.program.roles[(size_t)i.at];
  for (s32 k = 0; k < i.count; k++) {
    if (roles[k] != ROLE_USE && roles[k] != ROLE_DEFINE) continue;
    auto& state = w.wgmma_registers[(u32)o[k] >> 7];
    state.touched = w.wgmma_fences + 1;
    if (state.accumulating > w.wgmma_done || (roles[k] == ROLE_DEFINE && state.feeding > w.wgmma_done)) {
      report("wgmma-not-waited", w.pc, agent_code(AGENT_WARP, w.id), -1, -1, SPACE_NONE, 0,
             "register of a wgmma that no wgmma.wait_group waited for");
      return;
    }
  }
}

// A from registers: thread t holds rows t/4 and t/4 + 8 of its warp's 16.
void Cta::read_wgmma_fragment(f32* out, u32 group, const s32* operands, u32 format) {
  const u32 k_count = format == MATRIX_TF32 ? 8 : 16;
  for (u32 t = 0; t < 128; t++)
    for (u32 r = 0; r < 4; r++) {
      const u32 word = reg(warps[group + t / 32], operands[r])[t % 32];
      f32* row = out + (t / 32 * 16 + t % 32 / 4 + (r & 1) * 8) * k_count;
      if (format == MATRIX_TF32) row[t % 4 + (r >> 1) * 4] = tf32_of(word);
      else
        for (u32 e = 0; e < 2; e++) row[2 * (t % 4) + e + (r >> 1) * 8] = half_of(word, e, format ? TYPE_BF16 : TYPE_F16);
    }
}

// Two neighbouring columns of a row of D: thread 4 (row mod 8) + q of the row's warp holds columns 8 j + 2 q and the next,
// in registers 4 j and 4 j + 1, or the two after them for the lower eight rows of the warp.
template <class Visit> void Cta::each_wgmma_pair(u32 first_warp, u32 row, u32 n, const s32* o, Visit visit) {
  Warp& w = warps[first_warp + row / 16];
  const u32 thread = row % 8 * 4, low_rows = row % 16 / 8 * 2;
  for (u32 j = 0; j < n / 8; j++) {
    u32 *even = reg(w, o[4 * j + low_rows]) + thread, *odd = reg(w, o[4 * j + low_rows + 1]) + thread;
    for (u32 q = 0; q < 4; q++) visit(8 * j + 2 * q, even + q, odd + q);
  }
}

void Cta::run_wgmma(AsyncOp& op) {
  const Instr& i = launch.program.instructions[(size_t)op.pc];
  const s32* o = &launch.program.operands[(size_t)i.at];
  const u32 n = (u32)i.b, registers = n / 2, format = i.a == TYPE_TF32   ? MATRIX_TF32
                                                                      : i.a == TYPE_BF16 ? MATRIX_BF16
                                                                                         : MATRIX_F16;
  const u32 k_count = format == MATRIX_TF32 ? 8 : 16;
  const bool negated = !(i.c & 8) != !(i.c & 16);  // A or B, not both
  op.agent = pipe(AGENT_WGMMA, op.warp), op.clock = warpgroups_[op.warp / 4].executed + 1;
  pipes_[op.agent] = op.view;
  alignas(64) f32 a[WGMMA_ROWS * OPERAND_K], b[OPERAND_K * MATRIX_MAX_N], sums[WGMMA_ROWS * MATRIX_MAX_N];
  const Operand a_out{a, k_count, 1}, b_out{b, 1, n};
  if (i.c & 1) read_wgmma_fragment(a, op.warp, o + registers + 2, format);
  else read_operand(a_out, op.a, WGMMA_ROWS, i.c & 2, format, op);
  read_operand(b_out, op.b, n, i.c & 4, format, op);
  for (u32 k = 0; negated && k < WGMMA_ROWS * k_count; k++) a[k] = -a[k];
  f32* d[WGMMA_ROWS];
  for (u32 row = 0; row < WGMMA_ROWS; row++) {
    d[row] = sums + row * n;
    if (!op.accumulate) memset(d[row], 0, n * 4);
    else each_wgmma_pair(op.warp, row, n, o, [&](u32 c, u32* even, u32* odd) {
      d[row][c] = bit_cast<f32>(*even), d[row][c + 1] = bit_cast<f32>(*odd);
    });
  }
  multiply_add(d, a, b, WGMMA_ROWS, n, k_count);
  for (u32 row = 0; row < WGMMA_ROWS; row++)
    each_wgmma_pair(op.warp, row, n, o, [&](u32 c, u32* even, u32* odd) {
      *even = bit_cast<u32>(d[row][c]), *odd = bit_cast<u32>(d[row][c + 1]);
    });
  warpgroups_[op.warp / 4].executed++;
  launch.stats.mma++;
  progress++;
}

// Returns whether all but the latest groups are complete; runs what is queued of them.
bool Cta::wait_wgmma(Warp& w, const Instr& i) {
  if (w.wgmma_groups.size() <= (size_t)i.a) return true;
  const u32 wanted = w.wgmma_groups[w.wgmma_groups.size() - 1 - (size_t)i.a];
  Warpgroup& warpgroup = warpgroups_[w.id / 4];
  for (size_t k = 0; k < queue.size() && warpgroup.executed < wanted;) {
    if (queue[k].work != Work::WGMMA || queue[k].warp != w.id / 4 * 4) { k++; continue; }
    AsyncOp op = std::move(queue[k]);
    queue.erase(queue.begin() + (long)k);
    execute(op);
  }
  if (warpgroup.executed < wanted) {  // other warps of the group have not issued it yet
    w.state = WarpState::YIELDED;
    w.yielded_at = progress;
    w.yield_pc = w.pc;
    w.yield_address = 0;
    return false;
  }
  if (wanted > w.wgmma_done) {
    w.wgmma_done = wanted;
    if (checks(CHECK_RACES)) w.view.set_both(pipe(AGENT_WGMMA, w.id / 4 * 4), wanted);
  }
  return true;
}
