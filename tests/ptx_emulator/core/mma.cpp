// Matrix operands in shared and tensor memory, tcgen05.mma and tcgen05.cp.
#include "machine.h"

namespace {
constexpr u32 ATOMS_32B = 4;  // swizzle of 128 bytes in atoms of 32: the atom's index xor two bits of the row
}  // namespace

// One 16-byte chunk of an operand in shared memory.
const u8* Cta::read_chunk(u32 address, u32 swizzle, const Actor& who, const char* what) {
  u32 place = swizzle == ATOMS_32B ? address ^ (address >> 7 & 3) << 5 : swizzle_address(address, swizzle);
  if (place % 16) fault_at("misaligned", SPACE_SHARED, place, printed("%s not at a multiple of 16 B", what));
  check_shared(place, 16, what);
  check_shared_init(place, 16, what, who.pc, checks(CHECK_RACES) ? name_agent(who.agent) : -1);
  shadow_shared(place, 16, false, who);
  return &shared_[place];
}

// From the canonical layouts: core matrices of 8 rows by 16 bytes.
void Cta::read_operand(const Operand& out, u64 descriptor, u32 rows, bool mn_major, u32 format, AsyncOp& op) {
  const u32 start = (u32)(descriptor & 0x3fff) << 4, leading = (u32)(descriptor >> 16 & 0x3fff) << 4;
  const u32 stride = (u32)(descriptor >> 32 & 0x3fff) << 4, layout = descriptor >> 61 & 7;
  if (descriptor >> 49 & 7) FAULT("not-modelled", "matrix descriptor with a base offset: %016llx", (unsigned long long)descriptor);
  const bool wide = mn_major && format == MATRIX_TF32;  // an MN-major tf32 operand: CuTe DSL documents this one layout for it
  if (wide && layout != 1)
    FAULT("not-modelled", "MN-major tf32 operand with matrix descriptor layout %u: 1 (128 B in atoms of 32 B) expected", layout);
  static const s32 modes[8] = {0, -1, 3, -1, 2, -1, 1, -1};
  if (modes[layout] < 0 && !wide) FAULT("not-modelled", "matrix descriptor layout %u", layout);
  const u32 swizzle = wide ? ATOMS_32B : (u32)modes[layout], element = format == MATRIX_TF32 ? 4 : 2, per_chunk = 16 / element;
  const u32 k_count = OPERAND_K_BYTES / element, span = wide ? 8 : swizzle ? 1u << swizzle : 1;  // chunks in a swizzled row
  const u32 group = wide ? 4 : 8;  // values of K from one stride (of an MN-major operand) to the next
  Actor who{op.agent, op.clock, &pipes_[op.agent], true, op.pc, index, false};
  if (!mn_major) {
    for (u32 row = 0; row < rows; row++)
      for (u32 c = 0; c < 2; c++) {
        u32 at = start + row / 8 * stride + (swizzle ? row % 8 * span * 16 + c * 16 : row % 8 * 16 + c * leading);
        const u8* chunk = read_chunk(at, swizzle, who, "matrix operand");
        decode_chunk(chunk, format, out.values + row * out.row_stride + c * per_chunk * out.k_stride, out.k_stride);
      }
    return;
  }
  for (u32 k = 0; k < k_count; k++)
    for (u32 c = 0; c < rows / per_chunk; c++) {
      u32 at = swizzle ? start + c % span * 16 + c / span * leading + k % group * span * 16 + k / group * stride
                       : start + c * stride + k % 8 * 16 + k / 8 * leading;
      const u8* chunk = read_chunk(at, swizzle, who, "matrix operand");
      decode_chunk(chunk, format, out.values + c * per_chunk * out.row_stride + k * out.k_stride, out.row_stride);
    }
}

// Row r of a 64-row matrix lies in the first 16 lanes of each warp's quarter.
static u32 lane_of_row(u32 row, u32 rows) { return rows == 64 ? row / 16 * 32 + row % 16 : row; }

void Cta::read_tmem_operand(const Operand& out, u32 rows, u32 format, AsyncOp& op) {
  const u32 column = op.a_tmem & 0xffff, per_chunk = format == MATRIX_TF32 ? 4 : 8;
  check_columns(column, OPERAND_K_BYTES / 4, "tcgen05.mma A", op.pc, agent_code(AGENT_TENSOR, op.warp));
  for (u32 quarter = 0; quarter < 4; quarter++)
    touch_tmem(quarter, column, OPERAND_K_BYTES / 4, false, op.agent, op.clock, op.clock, pipes_[op.agent], op.pc);
  for (u32 row = 0; row < rows; row++) {
    const u32 at = lane_of_row(row, rows) * TMEM_COLUMNS + column;
    const u8* data = (const u8*)&tmem_[at];
    if (checks(CHECK_INIT) && memchr(&tmem_init_[at], 0, OPERAND_K_BYTES / 4))
      report("uninitialised-tmem", op.pc, agent_code(AGENT_TENSOR, op.warp), -1, -1, SPACE_TMEM,
             (u64)lane_of_row(row, rows) << 16 | column, "tcgen05.mma reads A that nothing has written");
    for (u32 c = 0; c < 2; c++)
      decode_chunk(data + 16 * c, format, out.values + row * out.row_stride + c * per_chunk * out.k_stride, out.k_stride);
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
  alignas(64) f32 a[TMEM_LANES * OPERAND_K], b[OPERAND_K * MATRIX_MAX_N];
  const Operand a_out{a, k_count, 1}, b_out{b, 1, n};
  if (op.from_tmem) read_tmem_operand(a_out, rows, a_format, op);
  else read_operand(a_out, op.a, rows, id >> 15 & 1, a_format, op);
  read_operand(b_out, op.b, n, id >> 16 & 1, b_format, op);
  check_columns(column, n, "tcgen05.mma D", op.pc, agent_code(AGENT_TENSOR, op.warp));
  for (u32 quarter = 0; quarter < 4; quarter++) {
    if (op.accumulate) touch_tmem(quarter, column, n, false, op.agent, op.clock, op.clock, pipes_[op.agent], op.pc);
    touch_tmem(quarter, column, n, true, op.agent, op.clock, op.clock, pipes_[op.agent], op.pc);
  }
  f32* d[TMEM_LANES];
  for (u32 row = 0; row < rows; row++) {
    const u32 lane = lane_of_row(row, rows);
    d[row] = (f32*)&tmem_[lane * TMEM_COLUMNS + column];
    u8* init = &tmem_init_[lane * TMEM_COLUMNS + column];
    if (!op.accumulate) memset(d[row], 0, n * 4);
    else if (checks(CHECK_INIT) && memchr(init, 0, n))
      report("uninitialised-tmem", op.pc, agent_code(AGENT_TENSOR, op.warp), -1, -1, SPACE_TMEM,
             (u64)lane << 16 | column, "tcgen05.mma accumulates onto what nothing has written");
    memset(init, 1, n);
  }
  multiply_add(d, a, b, rows, n, k_count);
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
      const u8* chunk = read_chunk(start + row / 8 * stride + row % 8 * 16 + c * leading, 0, who, "tcgen05.cp");
      for (u32 copy = 0; copy < copies; copy++) {
        const u32 lane = first(row) + copy * step;
        memcpy(&tmem_[lane * TMEM_COLUMNS + column + c * 4], chunk, 16);
        memset(&tmem_init_[lane * TMEM_COLUMNS + column + c * 4], 1, 4);
      }
    }
  for (u32 quarter = 0; quarter < 4; quarter++)
    touch_tmem(quarter, column, chunks * 4, true, op.agent, op.clock, op.clock, pipes_[op.agent], op.pc);
  progress++;
}
