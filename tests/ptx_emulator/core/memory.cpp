// Loads, stores and atomics, with bounds, alignment, initialisation and race checks.
#include <algorithm>
#include "machine.h"

void Cta::report(const char* kind, s32 pc, s32 agent, s32 other_pc, s32 other_agent, s32 space, u64 address,
                 std::string text, s32 other_cta) {
  launch.findings.add({kind, std::move(text), pc, agent, other_pc, other_agent, (s32)index, other_cta, space, address,
                       1, false});
}

void Cta::check_shared(u32 address, u32 bytes, const char* what) {
  if (address < SHARED_BASE || (u64)address + bytes > (u64)SHARED_BASE + launch.config.shared_bytes)
    fault_at("out-of-bounds", SPACE_SHARED, address,
             printed("%s of %u B outside the %u B of shared memory", what, bytes, launch.config.shared_bytes));
}

bool Cta::is_shared_window(u64 address) const { return address < LOCAL_BASE; }

void Cta::report_conflict(const ConflictSite& site, const Actor& who, bool write, s32 space, u64 address) {
  const bool shared = space == SPACE_SHARED;
  const char* kind = shared ? "shared-race" : "global-conflict";
  const char* what = "";
  switch (site.kind) {
    case Conflict::READ_AFTER_WRITE: what = "read, not ordered after the write"; break;
    case Conflict::WRITE_AFTER_WRITE: what = "write, not ordered after the other write"; break;
    case Conflict::WRITE_AFTER_READ: what = "write, not ordered after the read"; break;
    case Conflict::PROXY:
      kind = "missing-proxy-fence";
      what = write ? "asynchronous write over a generic-proxy write that no fence.proxy.async published"
                   : "asynchronous read of a generic-proxy write that no fence.proxy.async published";
      break;
    case Conflict::NOT_WAITED: kind = "copy-not-waited"; what = "cp.async data used before it was waited for"; break;
  }
  // Agents of another CTA are not known here; its warps are numbered alike, so the number is right for warps.
  s32 other = site.cta == who.cta ? name_agent(site.agent) : -1;
  report(kind, who.pc, name_agent(who.agent), site.pc, other, space, address, what,
         site.cta == who.cta ? -1 : (s32)site.cta);
}

void Cta::shadow_shared(u32 address, u32 bytes, bool write, const Actor& who) {
  if (!checks(CHECK_RACES)) return;
  shared_shadow_.access(address, bytes, write, who, [&](const ConflictSite& site, const Actor& actor, bool is_write) {
    report_conflict(site, actor, is_write, SPACE_SHARED, site.granule * shared_shadow_.granule());
  });
}

// Lanes of one warp are not ordered until they meet in a .sync instruction. `written` is null for a read.
void Cta::check_lanes(Warp& w, u32 lane, u32 address, u32 bytes, const u8* written) {
  if (!checks(CHECK_LANES)) return;
  const s32 agent = agent_code(AGENT_WARP, w.id);
  for (u32 byte = 0; byte < bytes; byte++) {
    LaneCell& cell = lane_cells_[address + byte];
    const bool unordered_write = cell.write_epoch == w.lane_epoch && cell.write_warp == w.id && cell.write_lane != lane;
    const bool unordered_read =
        cell.read_epoch == w.lane_epoch && cell.read_warp == w.id && (cell.read_lanes & ~(1u << lane));
    auto found = [&](const char* text, s32 other_pc) {
      report("lane-race", w.pc, agent, other_pc, agent, SPACE_SHARED, address + byte, text);
    };
    if (!written) {
      if (unordered_write) found("read of what another lane of the warp wrote, without a .sync between", cell.write_pc);
      if (cell.read_epoch != w.lane_epoch || cell.read_warp != w.id) cell.read_lanes = 0;
      cell.read_lanes |= 1u << lane;
      cell.read_epoch = w.lane_epoch, cell.read_pc = w.pc, cell.read_warp = (u8)w.id;
      continue;
    }
    // Lanes that write the same by one instruction are no harm.
    if (unordered_write && !(cell.write_pc == w.pc && shared_[address + byte] == written[byte]))
      found("write over what another lane of the warp wrote, without a .sync between", cell.write_pc);
    if (unordered_read) found("write over what another lane of the warp read, without a .sync between", cell.read_pc);
    cell.write_epoch = w.lane_epoch, cell.write_pc = w.pc, cell.write_warp = (u8)w.id, cell.write_lane = (u8)lane;
  }
}

void Cta::check_shared_init(u32 address, u32 bytes, const char* what, s32 pc, s32 agent) {
  if (!checks(CHECK_INIT)) return;
  const u8* bad = (const u8*)memchr(&shared_init_[address], 0, bytes);
  if (bad)
    report("uninitialised-shared", pc, agent, -1, -1, SPACE_SHARED, (u64)(bad - shared_init_.data()),
           printed("%s of shared memory that nothing has written", what));
}

u8* Cta::global_pointer(u64 address, u32 bytes, const char* what) {
  Region* last = launch.last_region;
  if (last && address >= last->base && address + bytes <= last->base + last->bytes) return (u8*)address;
  for (Region& region : launch.regions)
    if (address >= region.base && address + bytes <= region.base + region.bytes) {
      launch.last_region = &region;
      return (u8*)address;
    }
  fault_at("out-of-bounds", SPACE_GLOBAL, address, printed("%s of %u B outside every tensor", what, bytes));
}

void Cta::shadow_global(u64 address, u32 bytes, bool write, const Actor& who) {
  if (!checks(CHECK_GLOBAL)) return;
  Region& region = *launch.last_region;
  if (region.shadow.empty()) region.shadow.reset(region.bytes);
  region.shadow.access(address - region.base, bytes, write, who,
                       [&](const ConflictSite& site, const Actor& actor, bool is_write) {
                         u64 place = std::max(address, region.base + site.granule * region.shadow.granule());
                         report_conflict(site, actor, is_write, SPACE_GLOBAL, place);
                       });
}

u64 Cta::lane_address(Warp& w, s32 operand, u32 lane, s64 offset) {
  if (operand < 0) return (u64)offset;
  if (operand & 1) return reg64(w, operand)[lane] + (u64)offset;
  return (u32)(reg(w, operand)[lane] + (u32)offset);
}

namespace {
enum { PARAM, SHARED, GLOBAL, GENERIC, LOCAL };
constexpr u32 WIDE_REGISTER = 1, SIGN_EXTEND = 2;

void check_aligned(u64 address, u32 bytes, s32 space, const char* what) {
  if (address % bytes)
    fault_at("misaligned", space, address, printed("%s of %u B at an address that is no multiple of it", what, bytes));
}
}  // namespace

void Cta::load(Warp& w, const Instr& i, const s32* o, u32 m) {
  const u32 size = (u32)i.b, count = (u32)i.c & 255, flags = (u32)i.c >> 8, total = size * count;
  EACH_LANE(m) {
    u64 address = lane_address(w, o[0], lane, i.imm);
    s32 space = i.a;
    if (space == GENERIC) space = is_shared_window(address) ? SHARED : address < LOCAL_BASE * 2 ? LOCAL : GLOBAL;
    const u8* from;
    if (space == SHARED) {
      check_aligned(address, total, SPACE_SHARED, "load");
      check_shared((u32)address, total, "load");
      check_shared_init((u32)address, total, "load", w.pc, agent_code(AGENT_WARP, w.id));
      w.touched |= 1u << lane;
      shadow_shared((u32)address, total, false, actor(w));
      check_lanes(w, lane, (u32)address, total, nullptr);
      from = &shared_[address];
    } else if (space == LOCAL) {
      if (address < LOCAL_BASE || address + total > LOCAL_BASE + launch.config.local_bytes)
        FAULT("out-of-bounds", "local load at %llx", (unsigned long long)address);
      from = &w.local[lane * launch.config.local_bytes + (address - LOCAL_BASE)];
    } else if (space == PARAM) {
      from = (const u8*)address;
    } else {
      check_aligned(address, total, SPACE_GLOBAL, "load");
      from = global_pointer(address, total, "load");
      shadow_global(address, total, false, actor(w));
    }
    for (u32 v = 0; v < count; v++) {
      if (o[1 + v] < 0) continue;
      u64 value = 0;
      memcpy(&value, from + v * size, size);
      if ((flags & SIGN_EXTEND) && size < 8) value = (u64)((s64)(value << (64 - 8 * size)) >> (64 - 8 * size));
      if (flags & WIDE_REGISTER) reg64(w, o[1 + v])[lane] = value;
      else reg(w, o[1 + v])[lane] = size == 2 ? (u32)value & ((flags & SIGN_EXTEND) ? ~0u : 0xffff) : (u32)value;
    }
  }
}

void Cta::store(Warp& w, const Instr& i, const s32* o, u32 m) {
  const u32 size = (u32)i.b, count = (u32)i.c & 255, flags = (u32)i.c >> 8, total = size * count;
  EACH_LANE(m) {
    u64 address = lane_address(w, o[0], lane, i.imm);
    s32 space = i.a;
    if (space == GENERIC) space = is_shared_window(address) ? SHARED : address < LOCAL_BASE * 2 ? LOCAL : GLOBAL;
    u8* to;
    if (space == SHARED) {
      check_aligned(address, total, SPACE_SHARED, "store");
      check_shared((u32)address, total, "store");
      if (!barriers_.empty() && barriers_.count((u32)address & ~7u))
        report("barrier-misuse", w.pc, agent_code(AGENT_WARP, w.id), barriers_[(u32)address & ~7u].init_pc, -1,
               SPACE_SHARED, address, "ordinary store over a live mbarrier");
      w.touched |= 1u << lane;
      shadow_shared((u32)address, total, true, actor(w));
      memset(&shared_init_[address], 1, total);
      to = &shared_[address];
    } else if (space == LOCAL) {
      if (address < LOCAL_BASE || address + total > LOCAL_BASE + launch.config.local_bytes)
        FAULT("out-of-bounds", "local store at %llx", (unsigned long long)address);
      to = &w.local[lane * launch.config.local_bytes + (address - LOCAL_BASE)];
    } else if (space == PARAM) {
      FAULT("out-of-bounds", "store to a kernel parameter");
    } else {
      check_aligned(address, total, SPACE_GLOBAL, "store");
      to = global_pointer(address, total, "store");
      shadow_global(address, total, true, actor(w));
    }
    for (u32 v = 0; v < count; v++) {
      const u8* value = (const u8*)((flags & WIDE_REGISTER) ? (void*)&reg64(w, o[1 + v])[lane]
                                                            : (void*)&reg(w, o[1 + v])[lane]);
      if (space == SHARED) check_lanes(w, lane, (u32)address + v * size, size, value);
      memcpy(to + v * size, value, size);
    }
  }
  progress++;
}

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
  EACH_LANE(m) {
    u64 address = lane_address(w, o[0], lane, i.imm);
    const bool shared = i.a == SHARED || (i.a == GENERIC && is_shared_window(address));
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
