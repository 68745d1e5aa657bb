// What bulk copies and tensor copies (TMA) do when they run.
#include <algorithm>
#include "machine.h"

TensorMap decode_tensor_map(const u64* words, u32 rank) {
  static const u32 sizes[16] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 8, 2, 4, 4, 0, 0, 0};
  TensorMap map{};
  u32 fields = (u32)words[1];
  map.base = words[0];
  map.format = (fields >> 7) & 15;
  map.swizzle = (fields >> 13) & 3;
  map.rank = ((fields >> 4) & 7) + 1;
  if (map.rank != rank) FAULT("tensor-map", "tensor map of rank %u used by an instruction of rank %u", map.rank, rank);
  map.element_bytes = sizes[map.format];
  if (!map.element_bytes) FAULT("tensor-map", "element format %u of the tensor map is not known", map.format);
  const u64 mask = 0xffffffffull;
  map.stride[0] = map.element_bytes;
  map.stride[1] = (words[1] >> 32) * 16;
  map.stride[2] = (words[2] & mask) * 16;
  map.stride[3] = (words[2] >> 32) * 16;
  map.stride[4] = (words[3] & mask) * 16;
  u64 upper = words[3] >> 32;
  for (u32 d = 1; d < 5; d++) map.stride[d] += ((upper >> (4 * (d - 1))) & 15) << 36;
  for (u32 d = 0; d < 4; d++) map.dim[d] = (u32)(words[4 + d / 2] >> (32 * (d % 2))) + 1;
  map.dim[4] = (u32)words[6] + 1;
  map.box[0] = ((words[6] >> 56) & 255) + 1;
  for (u32 d = 1; d < 5; d++) map.box[d] = d < rank ? ((words[7] >> (8 * (d - 1))) & 255) + 1 : 1;
  return map;
}

void Cta::finish_load(AsyncOp& op, u32 bytes) {
  View view = op.view;
  view.set_both(op.agent, op.clock);
  change_tx(op.barrier, bytes, false, view, op.pc, agent_code(AGENT_LOAD, op.warp), true);
}

// The formats of a tensor map as the AtomicType of atomics.cpp.
static u32 reduction_type(u32 format) {
  enum { U32 = 0, S32 = 1, F32 = 2, U64 = 3, S64 = 4, BF16 = 10, F16 = 11 };
  switch (format) {
    case 2: return U32;
    case 3: return S32;
    case 4: return U64;
    case 5: return S64;
    case 6: return F16;
    case 7: return F32;
    case 10: return BF16;
  }
  FAULT("tensor-map", "reduction of element format %u", format);
}

void Cta::run_tensor_copy(AsyncOp& op) {
  global_pointer(op.global, 128, "tensor map");
  if (op.global % 64) fault_at("misaligned", SPACE_GLOBAL, op.global, "tensor map not at a multiple of 64 B");
  const TensorMap map = decode_tensor_map((const u64*)op.global, op.gather ? 2 : op.rank);
  if (op.gather && map.box[1] != 1) FAULT("tensor-map", "box of %u rows for a gather of four", map.box[1]);
  const bool load = op.work == Work::TENSOR_LOAD;
  const u32 row_bytes = map.box[0] * map.element_bytes;
  const u32 total = op.gather ? 4 * row_bytes : row_bytes * map.box[1] * map.box[2] * map.box[3] * map.box[4];
  const u32 span = map.swizzle ? 16u << map.swizzle : ~0u;
  if (op.shared % 128) fault_at("misaligned", SPACE_SHARED, op.shared, "tensor copy not at a multiple of 128 B");
  // Seen on an H200 (bf16, 4 dimensions, a box outside at -1): cudaErrorIllegalInstruction. Loads there give zeros.
  for (u32 d = 0; !load && op.reduction && d < op.rank; d++)
    if (op.coordinates[d] < 0) FAULT("tensor-map", "tensor addition at coordinate %d", op.coordinates[d]);
  if (row_bytes > span || row_bytes % 16)
    FAULT("tensor-map", "box rows of %u B: a multiple of 16 within the swizzle span expected", row_bytes);
  check_shared(op.shared, total, "tensor copy");
  launch.stats.async_bytes += total;
  Actor who = async_actor(op);
  s32 name = agent_code(load ? AGENT_LOAD : AGENT_STORE, op.warp);
  shadow_shared(op.shared, total, load, who);
  if (!load) check_shared_init(op.shared, total, "tensor store", op.pc, name);
  u32 place = op.shared;
  u32 at[5] = {0, 0, 0, 0, 0};
  const u32 rows = total / row_bytes;
  u8 row_values[256 * 8];  // of a reduction, unswizzled; a box has at most 256 elements a row
  for (u32 row = 0; row < rows; row++, place += row_bytes) {
    bool inside = true;
    u64 base = map.base;
    for (u32 d = 1; d < map.rank; d++) {
      s64 coordinate = op.gather ? op.coordinates[1 + row] : (s64)op.coordinates[d] + at[d];
      inside = inside && coordinate >= 0 && coordinate < (s64)map.dim[d];
      base += (u64)(coordinate * (s64)map.stride[d]);
    }
    // The part of the row that lies inside the tensor.
    s64 from = std::clamp<s64>(-(s64)op.coordinates[0], 0, map.box[0]);
    s64 to = std::clamp<s64>((s64)map.dim[0] - op.coordinates[0], from, map.box[0]);
    if (!inside) from = to = 0;
    const u32 begin = (u32)from * map.element_bytes, end = (u32)to * map.element_bytes;
    u64 global = base + (u64)((s64)op.coordinates[0] * map.element_bytes);
    u8* data = nullptr;
    if (end > begin) {
      data = global_pointer(global + begin, end - begin, load ? "tensor load" : "tensor store") - begin;
      if (load || !op.reduction) {
        shadow_global(global + begin, end - begin, !load, who);
      } else {
        Actor atomic = who;
        atomic.atomic = true;
        shadow_global(global + begin, end - begin, true, atomic);
      }
    }
    for (u32 chunk = 0; chunk < row_bytes; chunk += 16) {
      u8* cell = &shared_[swizzle_address(place + chunk, map.swizzle)];
      u32 low_byte = std::max(chunk, begin), high_byte = std::min(chunk + 16, end);
      if (load) {
        memset(cell, 0, 16);
        if (high_byte > low_byte) memcpy(cell + (low_byte - chunk), data + low_byte, high_byte - low_byte);
        memset(&shared_init_[(size_t)(cell - shared_.data())], 1, 16);
      } else if (high_byte > low_byte) {
        memcpy((op.reduction ? row_values : data) + low_byte, cell + (low_byte - chunk), high_byte - low_byte);
      }
    }
    if (op.reduction && end > begin)
      reduce_global(data + begin, row_values + begin, end - begin, reduction_type(map.format), op.reduction - 1);
    for (u32 d = 1; d < 5; d++) {
      if (++at[d] < map.box[d]) break;
      at[d] = 0;
    }
  }
  if (load) finish_load(op, total);
  progress++;
}

void Cta::run_bulk(AsyncOp& op) {
  // BULK_TYPES of handlers_async.py as the AtomicType of atomics.cpp.
  static const u32 types[] = {0, 2, 11, 10, 0, 1, 3, 9, 5};
  const bool load = op.work == Work::BULK_LOAD;
  if (!op.bytes || op.bytes % 16) FAULT("misaligned", "bulk copy of %u B, no multiple of 16", op.bytes);
  if (op.shared % 16) fault_at("misaligned", SPACE_SHARED, op.shared, "bulk copy not at a multiple of 16 B");
  if (op.global % 16) fault_at("misaligned", SPACE_GLOBAL, op.global, "bulk copy not at a multiple of 16 B");
  check_shared(op.shared, op.bytes, "bulk copy");
  u8* data = global_pointer(op.global, op.bytes, "bulk copy");
  launch.stats.async_bytes += op.bytes;
  Actor who = async_actor(op);
  shadow_shared(op.shared, op.bytes, load, who);
  if (load) {
    shadow_global(op.global, op.bytes, false, who);
    memcpy(&shared_[op.shared], data, op.bytes);
    memset(&shared_init_[op.shared], 1, op.bytes);
    finish_load(op, op.bytes);
  } else {
    check_shared_init(op.shared, op.bytes, "bulk store", op.pc, agent_code(AGENT_STORE, op.warp));
    who.atomic = op.reduction != 0;
    shadow_global(op.global, op.bytes, true, who);
    if (!op.reduction) memcpy(data, &shared_[op.shared], op.bytes);
    else reduce_global(data, &shared_[op.shared], op.bytes, types[op.type], op.reduction - 1);
  }
  progress++;
}
