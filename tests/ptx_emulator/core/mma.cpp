// Matrix operands in shared and tensor memory, tcgen05.mma and tcgen05.cp.
#include "machine.h"

namespace {
constexpr u32 K_BYTES = 32;  // both operand kinds take 32 bytes of K an instruction
constexpr u32 ATOMS_32B = 4;  // swizzle of 128 bytes in atoms of 32: the atom's index xor two bits of the row

f32 decode(const u8* data, u32 format) {
  if (format == 2) { u32 word; memcpy(&word, data, 4); return bit_cast<f32>(word & 0xffffe000u); }
  u16 half;
  memcpy(&half, data, 2);
  return format == 1 ? from_bf16(half) : from_f16(half);
}
}  // namespace

// One 16-byte chunk of an operand in shared memory.
u32 Cta::read_chunk(u32 address, u32 swizzle, u8* out, const Actor& who, const char* what) {
  u32 place = swizzle == ATOMS_32B ? address ^ (address >> 7 & 3) << 5 : swizzle_address(address, swizzle);
  if (place % 16) fault_at("misaligned", SPACE_SHARED, place, printed("%s not at a multiple of 16 B", what));
  check_shared(place, 16, what);
  check_shared_init(place, 16, what, who.pc, checks(CHECK_RACES) ? name_agent(who.agent) : -1);
  shadow_shared(place, 16, false, who);
  memcpy(out, &shared_[place], 16);
  return place;
}

// Fills out[row * k_count + k] from the canonical layouts: core matrices of 8 rows by 16 bytes.
void Cta::read_operand(f32* out, u64 descriptor, u32 rows, bool mn_major, u32 format, AsyncOp& op) {
  const u32 start = (u32)(descriptor & 0x3fff) << 4, leading = (u32)(descriptor >> 16 & 0x3fff) << 4;
  const u32 stride = (u32)(descriptor >> 32 & 0x3fff) << 4, layout = descriptor >> 61 & 7;
  if (descriptor >> 49 & 7) FAULT("not-modelled", "matrix descriptor with a base offset: %016llx", (unsigned long long)descriptor);
  const bool wide = mn_major && format == 2;  // an MN-major tf32 operand: CuTe DSL documents this one layout for it
  if (wide && layout != 1)
    FAULT("not-modelled", "MN-major tf32 operand with matrix descriptor layout %u: 1 (128 B in atoms of 32 B) expected", layout);
  static const s32 modes[8] = {0, -1, 3, -1, 2, -1, 1, -1};
  if (modes[layout] < 0 && !wide) FAULT("not-modelled", "matrix descriptor layout %u", layout);
  const u32 swizzle = wide ? ATOMS_32B : (u32)modes[layout], element = format == 2 ? 4 : 2, per_chunk = 16 / element;
  const u32 k_count = K_BYTES / element, span = wide ? 8 : swizzle ? 1u << swizzle : 1;  // chunks in a swizzled row
  const u32 group = wide ? 4 : 8;  // values of K from one stride (of an MN-major operand) to the next
  Actor who{op.agent, op.clock, &pipes_[op.agent], true, op.pc, index, false};
  u8 chunk[16];
  if (!mn_major) {
    for (u32 row = 0; row < rows; row++)
      for (u32 c = 0; c < 2; c++) {
        u32 at = start + row / 8 * stride + (swizzle ? row % 8 * span * 16 + c * 16 : row % 8 * 16 + c * leading);
        read_chunk(at, swizzle, chunk, who, "matrix operand");
        for (u32 e = 0; e < per_chunk; e++) out[row * k_count + c * per_chunk + e] = decode(chunk + e * element, format);
      }
    return;
  }
  for (u32 k = 0; k < k_count; k++)
    for (u32 c = 0; c < rows / per_chunk; c++) {
      u32 at = swizzle ? start + c % span * 16 + c / span * leading + k % group * span * 16 + k / group * stride
                       : start + c * stride + k % 8 * 16 + k / 8 * leading;
      read_chunk(at, swizzle, chunk, who, "matrix operand");
      for (u32 e = 0; e < per_chunk; e++)
        out[(c * per_chunk + e) * k_count + k] = decode(chunk + e * element, format);
    }
}

// Row r of a 64-row matrix lies in the first 16 lanes of each warp's quarter.
static u32 lane_of_row(u32 row, u32 rows) { return rows == 64 ? row / 16 * 32 + row % 16 : row; }

void Cta::read_tmem_operand(f32* out, u32 rows, u32 format, AsyncOp& op) {
  const u32 column = op.a_tmem & 0xffff, element = format == 2 ? 4 : 2, k_count = K_BYTES / element;
  check_columns(column, K_BYTES / 4, "tcgen05.mma A", op.pc, agent_code(AGENT_TENSOR, op.warp));
  for (u32 quarter = 0; quarter < 4; quarter++)
    for (u32 c = 0; c < K_BYTES / 4; c++)
      touch_tmem(quarter, column + c, false, op.agent, op.clock, op.clock, pipes_[op.agent], op.pc);
  for (u32 row = 0; row < rows; row++) {
    const u32 at = lane_of_row(row, rows) * TMEM_COLUMNS + column;
    const u8* data = (const u8*)&tmem_[at];
    if (checks(CHECK_INIT) && memchr(&tmem_init_[at], 0, K_BYTES / 4))
      report("uninitialised-tmem", op.pc, agent_code(AGENT_TENSOR, op.warp), -1, -1, SPACE_TMEM,
             (u64)lane_of_row(row, rows) << 16 | column, "tcgen05.mma reads A that nothing has written");
    for (u32 k = 0; k < k_count; k++) out[row * k_count + k] = decode(data + k * element, format);
  }
}

void Cta::run_mma(AsyncOp& op) {
  const u32 id = op.descriptor;
  const u32 a_format = id >> 7 & 7, b_format = id >> 10 & 7, n = (id >> 17 & 63) * 8, rows = (id >> 24 & 31) * 16;
  const u32 expected = op.tf32 ? 2 : 1;
  if ((id >> 4 & 3) != 1) FAULT("not-modelled", "tcgen05.mma with an accumulator other than f32 (descriptor %08x)", id);
  if (id & 0x600f) FAULT("not-modelled", "tcgen05.mma sparse, saturating or negating (descriptor %08x)", id);
  if (op.tf32 ? a_format != 2 || b_format != 2 : a_format > expected || b_format > expected)
    FAULT("not-modelled", "tcgen05.mma element formats %u and %u", a_format, b_format);
  if ((rows != 64 && rows != 128) || !n || n > 256 || n % (rows == 64 ? 8 : 16))
    FAULT("not-modelled", "tcgen05.mma of %u rows and %u columns", rows, n);
  launch.stats.mma++;
  const u32 k_count = op.tf32 ? 8 : 16, column = op.d & 0xffff;
  if (op.d >> 16) FAULT("not-modelled", "tcgen05.mma D at lane %u", op.d >> 16);
  f32 a[128 * 16], b[256 * 16], sums[256];
  if (op.from_tmem) read_tmem_operand(a, rows, a_format, op);
  else read_operand(a, op.a, rows, id >> 15 & 1, a_format, op);
  read_operand(b, op.b, n, id >> 16 & 1, b_format, op);
  check_columns(column, n, "tcgen05.mma D", op.pc, agent_code(AGENT_TENSOR, op.warp));
  if (checks(CHECK_RACES))
    for (u32 quarter = 0; quarter < 4; quarter++)
      for (u32 c = column; c < column + n; c++) {
        if (op.accumulate) touch_tmem(quarter, c, false, op.agent, op.clock, op.clock, pipes_[op.agent], op.pc);
        touch_tmem(quarter, c, true, op.agent, op.clock, op.clock, pipes_[op.agent], op.pc);
      }
  f32 transposed[16 * 256];
  for (u32 c = 0; c < n; c++)
    for (u32 k = 0; k < k_count; k++) transposed[k * n + c] = b[c * k_count + k];
  for (u32 row = 0; row < rows; row++) {
    const u32 lane = lane_of_row(row, rows);
    f32* d = (f32*)&tmem_[lane * TMEM_COLUMNS + column];
    u8* init = &tmem_init_[lane * TMEM_COLUMNS + column];
    if (op.accumulate) {
      if (checks(CHECK_INIT) && memchr(init, 0, n))
        report("uninitialised-tmem", op.pc, agent_code(AGENT_TENSOR, op.warp), -1, -1, SPACE_TMEM,
               (u64)lane << 16 | column, "tcgen05.mma accumulates onto what nothing has written");
      memcpy(sums, d, n * 4);
    } else {
      memset(sums, 0, n * 4);
    }
    for (u32 k = 0; k < k_count; k++) {
      const f32 factor = a[row * k_count + k];
      const f32* values = transposed + k * n;
      // Products of 16-bit and tf32 values are exact in f32, so that a fused multiply-add rounds alike.
      for (u32 c = 0; c < n; c++) sums[c] = sums[c] + factor * values[c];
    }
    memcpy(d, sums, n * 4);
    memset(init, 1, n);
  }
  progress++;
}

void Cta::run_tmem_copy(AsyncOp& op) {
  enum { CP_128x256b, CP_128x128b, CP_64x128b_02_13, CP_64x128b_01_23, CP_32x128b };
  // Rows in shared memory, and where the copies of row r go: lanes first(r), first(r) + step, ...
  const u32 rows = op.shape == CP_32x128b ? 32 : op.shape >= CP_64x128b_02_13 ? 64 : 128;
  const u32 step = op.shape == CP_64x128b_02_13 ? 64 : rows < 128 ? 32 : 128;
  const u32 copies = 128 / rows, chunks = op.shape == CP_128x256b ? 2 : 1;
  auto first = [&](u32 row) { return op.shape == CP_64x128b_01_23 ? row % 32 + row / 32 * 64 : row; };
  const u32 column = op.d & 0xffff, start = (u32)(op.a & 0x3fff) << 4;
  const u32 leading = (u32)(op.a >> 16 & 0x3fff) << 4, stride = (u32)(op.a >> 32 & 0x3fff) << 4;
  if (op.a >> 61 & 7) FAULT("not-modelled", "tcgen05.cp from a swizzled layout");
  check_columns(column, chunks * 4, "tcgen05.cp", op.pc, agent_code(AGENT_TENSOR, op.warp));
  Actor who{op.agent, op.clock, &pipes_[op.agent], true, op.pc, index, false};
  for (u32 row = 0; row < rows; row++)
    for (u32 c = 0; c < chunks; c++) {
      u8 chunk[16];
      read_chunk(start + row / 8 * stride + row % 8 * 16 + c * leading, 0, chunk, who, "tcgen05.cp");
      for (u32 copy = 0; copy < copies; copy++) {
        const u32 lane = first(row) + copy * step;
        memcpy(&tmem_[lane * TMEM_COLUMNS + column + c * 4], chunk, 16);
        memset(&tmem_init_[lane * TMEM_COLUMNS + column + c * 4], 1, 4);
      }
    }
  for (u32 quarter = 0; quarter < 4; quarter++)
    for (u32 c = 0; c < chunks * 4; c++)
      touch_tmem(quarter, column + c, true, op.agent, op.clock, op.clock, pipes_[op.agent], op.pc);
  progress++;
}
