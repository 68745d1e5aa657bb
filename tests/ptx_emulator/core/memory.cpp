// Loads, stores and atomics, with bounds, alignment, initialisation and race checks.
#include <algorithm>
#include "machine.h"

void Cta::report(const char* kind, s32 pc, s32 agent, s32 other_pc, s32 other_agent, s32 space, u64 address,
                 std::string text, s32 other_cta, u32 count) {
  launch.findings.add({kind, std::move(text), pc, agent, other_pc, other_agent, (s32)index, other_cta, space, address,
                       count, false});
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
         site.cta == who.cta ? -1 : (s32)site.cta, site.granules);
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
  for (u32 at = address; at < address + bytes;) {
    LaneCell& word = lane_cells_[at / 4];
    if (!word.split && at % 4 == 0 && address + bytes - at >= 4) {
      check_lane_cell(word, w, lane, at, 4, written ? written + (at - address) : nullptr);
      at += 4;
      continue;
    }
    if (!word.split) {
      std::fill_n(&lane_byte_cells_[at / 4 * 4], 4, word);
      word.split = true;
    }
    check_lane_cell(lane_byte_cells_[at], w, lane, at, 1, written ? written + (at - address) : nullptr);
    at++;
  }
}

void Cta::check_lane_cell(LaneCell& cell, Warp& w, u32 lane, u32 address, u32 bytes, const u8* written) {
  const bool unordered_write = cell.write_epoch == w.lane_epoch && cell.write_warp == w.id && cell.write_lane != lane;
  auto found = [&](const char* text, s32 other_pc) {
    const s32 agent = agent_code(AGENT_WARP, w.id);
    report("lane-race", w.pc, agent, other_pc, agent, SPACE_SHARED, address, text);
  };
  if (!written) {
    if (unordered_write) found("read of what another lane of the warp wrote, without a .sync between", cell.write_pc);
    if (cell.read_epoch != w.lane_epoch || cell.read_warp != w.id) cell.read_lanes = 0;
    cell.read_lanes |= 1u << lane;
    cell.read_epoch = w.lane_epoch, cell.read_pc = w.pc, cell.read_warp = (u8)w.id;
    return;
  }
  // Lanes that write the same by one instruction are no harm.
  if (unordered_write && !(cell.write_pc == w.pc && !memcmp(&shared_[address], written, bytes)))
    found("write over what another lane of the warp wrote, without a .sync between", cell.write_pc);
  if (cell.read_epoch == w.lane_epoch && cell.read_warp == w.id && (cell.read_lanes & ~(1u << lane)))
    found("write over what another lane of the warp read, without a .sync between", cell.read_pc);
  cell.write_epoch = w.lane_epoch, cell.write_pc = w.pc, cell.write_warp = (u8)w.id, cell.write_lane = (u8)lane;
}

void Cta::check_shared_init(u32 address, u32 bytes, const char* what, s32 pc, s32 agent) {
  if (!checks(CHECK_INIT)) return;
  const u8* bad = (const u8*)memchr(&shared_init_[address], 0, bytes);
  if (bad)
    report("uninitialised-shared", pc, agent, -1, -1, SPACE_SHARED, (u64)(bad - shared_init_.data()),
           printed("%s of shared memory that nothing has written", what));
}

Region* Cta::region_of(u64 address, u32 bytes) {
  auto holds = [&](const Region& region) {
    return address >= region.base && address + bytes <= region.base + region.bytes;
  };
  if (launch.last_region && holds(*launch.last_region)) return launch.last_region;
  for (Region& region : launch.regions)
    if (holds(region)) return launch.last_region = &region;
  return nullptr;
}

u8* Cta::global_pointer(u64 address, u32 bytes, const char* what) {
  if (!region_of(address, bytes))
    fault_at("out-of-bounds", SPACE_GLOBAL, address, printed("%s of %u B outside every tensor", what, bytes));
  return (u8*)address;
}

// Of bytes that lie in tensors, maybe in several.
void Cta::shadow_global(u64 address, u32 bytes, bool write, const Actor& who) {
  if (!checks(CHECK_GLOBAL)) return;
  while (bytes) {
    Region& region = *region_of(address, 1);
    const u32 part = (u32)std::min<u64>(bytes, region.base + region.bytes - address);
    if (region.shadow.empty()) region.shadow.reset(region.bytes);
    region.shadow.access(address - region.base, part, write, who,
                         [&](const ConflictSite& site, const Actor& actor, bool is_write) {
                           u64 place = std::max(address, region.base + site.granule * region.shadow.granule());
                           report_conflict(site, actor, is_write, SPACE_GLOBAL, place);
                         });
    address += part, bytes -= part;
  }
}

u64 Cta::lane_address(Warp& w, s32 operand, u32 lane, s64 offset) {
  if (operand < 0) return (u64)offset;
  if (operand & 1) return reg64(w, operand)[lane] + (u64)offset;
  return (u32)(reg(w, operand)[lane] + (u32)offset);
}

void Cta::lane_addresses(Warp& w, s32 operand, s64 offset, u64* out) {
  if (operand >= 0 && !(operand & 1)) {
    const u32* base = reg(w, operand);
    for (u32 lane = 0; lane < 32; lane++) out[lane] = (u32)(base[lane] + (u32)offset);
    return;
  }
  for (u32 lane = 0; lane < 32; lane++) out[lane] = lane_address(w, operand, lane, offset);
}

namespace {
constexpr u32 WIDE_REGISTER = 1, SIGN_EXTEND = 2;
}  // namespace

void check_aligned(u64 address, u32 bytes, s32 space, const char* what) {
  if (address % bytes)
    fault_at("misaligned", space, address, printed("%s of %u B at an address that is no multiple of it", what, bytes));
}

// Checks of an access by several lanes to one space; `places` gets where the data lies.
void Cta::access_shared(Warp& w, const u64* addresses, u32 m, u32 bytes, bool write, u8** places) {
  const char* what = write ? "store" : "load";
  EACH_LANE(m) {
    const u32 address = (u32)addresses[lane];
    check_aligned(address, bytes, SPACE_SHARED, what);
    check_shared(address, bytes, what);
    if (write && address + bytes > barriers_begin_ && address < barriers_end_ && barriers_.count(address & ~7u))
      report("barrier-misuse", w.pc, agent_code(AGENT_WARP, w.id), barriers_[address & ~7u].init_pc, -1, SPACE_SHARED,
             address, "ordinary store over a live mbarrier");
    places[lane] = &shared_[address];
  }
  w.touched |= m;
  const Actor who = actor(w);
  each_run(addresses, m, bytes, [&](u64 address, u32 length) {
    if (write) memset(&shared_init_[address], 1, length);
    else check_shared_init((u32)address, length, what, w.pc, agent_code(AGENT_WARP, w.id));
    shadow_shared((u32)address, length, write, who);
  });
  if (!write && checks(CHECK_LANES)) EACH_LANE(m) check_lanes(w, lane, (u32)addresses[lane], bytes, nullptr);
}

void Cta::access_global(Warp& w, const u64* addresses, u32 m, u32 bytes, bool write, u8** places) {
  const char* what = write ? "store" : "load";
  EACH_LANE(m) {
    check_aligned(addresses[lane], bytes, SPACE_GLOBAL, what);
    places[lane] = global_pointer(addresses[lane], bytes, what);
  }
  const Actor who = actor(w);
  if (checks(CHECK_GLOBAL))
    each_run(addresses, m, bytes, [&](u64 address, u32 length) { shadow_global(address, length, write, who); });
}

void Cta::access_local(Warp& w, const u64* addresses, u32 m, u32 bytes, bool write, u8** places) {
  EACH_LANE(m) {
    const u64 address = addresses[lane];
    if (address < LOCAL_BASE || address + bytes > LOCAL_BASE + launch.config.local_bytes)
      FAULT("out-of-bounds", "local %s at %llx", write ? "store" : "load", (unsigned long long)address);
    places[lane] = &w.local[lane * launch.config.local_bytes + (address - LOCAL_BASE)];
  }
}

// Where a load or store of several lanes finds its data. Returns the lanes that access shared memory.
u32 Cta::access(Warp& w, s32 space, const u64* addresses, u32 m, u32 bytes, bool write, u8** places) {
  if (space == MEMORY_PARAM) {
    if (write) FAULT("out-of-bounds", "store to a kernel parameter");
    EACH_LANE(m) places[lane] = (u8*)addresses[lane];
    return 0;
  }
  u32 shared = space == MEMORY_SHARED ? m : 0, local = space == MEMORY_LOCAL ? m : 0;
  if (space == MEMORY_GENERIC)
    EACH_LANE(m) {
      if (is_shared_window(addresses[lane])) shared |= 1u << lane;
      else if (addresses[lane] < LOCAL_BASE * 2) local |= 1u << lane;
    }
  const u32 global = m & ~shared & ~local;
  if (shared) access_shared(w, addresses, shared, bytes, write, places);
  if (local) access_local(w, addresses, local, bytes, write, places);
  if (global) access_global(w, addresses, global, bytes, write, places);
  return shared;
}

void Cta::load(Warp& w, const Instr& i, const s32* o, u32 m) {
  const u32 size = (u32)i.b, count = (u32)i.c & 255, flags = (u32)i.c >> 8;
  u64 addresses[32];
  u8* places[32];
  lane_addresses(w, o[0], i.imm, addresses);
  access(w, i.a, addresses, m, size * count, false, places);
  for (u32 v = 0; v < count; v++) {
    if (o[1 + v] < 0) continue;
    if (size == 4 && !(flags & WIDE_REGISTER)) {
      u32* values = reg(w, o[1 + v]);
      EACH_LANE(m) memcpy(&values[lane], places[lane] + v * 4, 4);
      continue;
    }
    EACH_LANE(m) {
      u64 value = 0;
      memcpy(&value, places[lane] + v * size, size);
      if ((flags & SIGN_EXTEND) && size < 8) value = (u64)((s64)(value << (64 - 8 * size)) >> (64 - 8 * size));
      if (flags & WIDE_REGISTER) reg64(w, o[1 + v])[lane] = value;
      else reg(w, o[1 + v])[lane] = size == 2 ? (u32)value & ((flags & SIGN_EXTEND) ? ~0u : 0xffff) : (u32)value;
    }
  }
}

void Cta::store(Warp& w, const Instr& i, const s32* o, u32 m) {
  const u32 size = (u32)i.b, count = (u32)i.c & 255, flags = (u32)i.c >> 8;
  u64 addresses[32];
  u8* places[32];
  lane_addresses(w, o[0], i.imm, addresses);
  const u32 shared = access(w, i.a, addresses, m, size * count, true, places);
  const u32 step = flags & WIDE_REGISTER ? 8 : 4;
  EACH_LANE(m)
    for (u32 v = 0; v < count; v++) {
      const u8* value = (const u8*)reg(w, o[1 + v]) + lane * step;
      // Compares with what earlier lanes have just stored.
      if (shared >> lane & 1) check_lanes(w, lane, (u32)addresses[lane] + v * size, size, value);
      if (size == 4) memcpy(places[lane] + v * 4, value, 4);
      else memcpy(places[lane] + v * size, value, size);
    }
  progress++;
}
