// Scheduling: the warps of a CTA, the CTAs of a launch, and what to say when nothing moves.
#include <algorithm>
#include "machine.h"

namespace {
void fill_special(const Launch& launch, const u32* block, u32 warp, u32 number, u32* values) {
  const LaunchConfig& c = launch.config;
  // The order of SPECIALS in lower.py.
  enum { TID_X, TID_Y, TID_Z, NTID_X, NTID_Y, NTID_Z, CTAID_X, CTAID_Y, CTAID_Z, NCTAID_X, NCTAID_Y, NCTAID_Z, LANE,
         WARP, NWARP, SM, CLUSTER_X, CLUSTER_Y, CLUSTER_Z, NCLUSTER_X, NCLUSTER_Y, NCLUSTER_Z, CLUSTER_RANK,
         CLUSTER_SIZE, CLUSTER_CTA_X, CLUSTER_CTA_Y, CLUSTER_CTA_Z, CLUSTER_NCTA_X, CLUSTER_NCTA_Y, CLUSTER_NCTA_Z,
         MASK_EQ, MASK_LT, MASK_LE, MASK_GT, MASK_GE, DYNAMIC_BYTES, TOTAL_BYTES, GRID_ID };
  for (u32 lane = 0; lane < 32; lane++) {
    u32 thread = warp * 32 + lane, value = 0, bit = 1u << lane;
    switch (number) {
      case TID_X: value = thread % c.block[0]; break;
      case TID_Y: value = thread / c.block[0] % c.block[1]; break;
      case TID_Z: value = thread / c.block[0] / c.block[1]; break;
      case NTID_X: case NTID_Y: case NTID_Z: value = c.block[number - NTID_X]; break;
      case CTAID_X: case CTAID_Y: case CTAID_Z: value = block[number - CTAID_X]; break;
      case NCTAID_X: case NCTAID_Y: case NCTAID_Z: value = c.grid[number - NCTAID_X]; break;
      case LANE: value = lane; break;
      case WARP: value = warp; break;
      case NWARP: value = (c.block[0] * c.block[1] * c.block[2] + 31) / 32; break;
      case CLUSTER_X: case CLUSTER_Y: case CLUSTER_Z: value = block[number - CLUSTER_X]; break;
      case NCLUSTER_X: case NCLUSTER_Y: case NCLUSTER_Z: value = c.grid[number - NCLUSTER_X]; break;
      case CLUSTER_SIZE: case CLUSTER_NCTA_X: case CLUSTER_NCTA_Y: case CLUSTER_NCTA_Z: value = 1; break;
      case MASK_EQ: value = bit; break;
      case MASK_LT: value = bit - 1; break;
      case MASK_LE: value = bit | (bit - 1); break;
      case MASK_GT: value = ~(bit | (bit - 1)); break;
      case MASK_GE: value = ~(bit - 1); break;
      case DYNAMIC_BYTES: value = c.dynamic_bytes; break;
      case TOTAL_BYTES: value = c.shared_bytes; break;
    }
    values[lane] = value;
  }
}
}  // namespace

void Cta::start(u32 linear_index) {
  const LaunchConfig& c = launch.config;
  const Program& program = launch.program;
  index = linear_index;
  block[0] = index % c.grid[0], block[1] = index / c.grid[0] % c.grid[1], block[2] = index / c.grid[0] / c.grid[1];
  threads = c.block[0] * c.block[1] * c.block[2];
  warps_count = (threads + 31) / 32;
  const u32 bytes = SHARED_BASE + c.shared_bytes + SHARED_GUARD;
  shared_.assign(bytes, 0xCD);
  shared_init_.assign(bytes, 0);
  if (checks(CHECK_RACES)) shared_shadow_.reset(bytes);
  if (checks(CHECK_LANES)) lane_cells_.reserve(bytes / 4 + 1), lane_byte_cells_.reserve(bytes + 4);
  tmem_.reserve(TMEM_LANES * TMEM_COLUMNS), tmem_init_.reserve(TMEM_LANES * TMEM_COLUMNS);  // filled when allocated
  if (tmem_dirty_) {
    tmem_cells_.clear();
    tmem_cells_.resize(4 * TMEM_COLUMNS);
  }
  column_state_.assign(TMEM_COLUMNS, FREE);
  column_release_pc_.assign(TMEM_COLUMNS, -1);
  column_alloc_pc_.assign(TMEM_COLUMNS, -1);
  tmem_dirty_ = relinquished_ = false;
  barriers_.clear();
  barriers_begin_ = ~0u, barriers_end_ = 0;
  for (NamedBarrier& barrier : named_) barrier = NamedBarrier();
  warpgroups_.clear();
  warpgroups_.resize((warps_count + 3) / 4);
  queue.clear();
  progress = 1, stalls_ = 0, stalled_at_ = 0, next_warp_ = 0, current_warp = -1, free_registers_ = 0;
  rng = 0x9E3779B97F4A7C15ull ^ ((u64)c.seed * 0x12345679ull + 1) ^ ((u64)index * 0xD1B54A32D192ED03ull);
  agents_.clear();
  for (u32 id = 0; id < warps_count; id++) agents_.push_back({AGENT_WARP, id, 0});
  pipes_.clear();
  pipes_.resize(warps_count);
  // Registers keep what an earlier CTA left: a read of one is reported by its init mask, not by its value.
  register_file_.resize((size_t)warps_count * program.register_bytes + 128, 0xA5);
  predicate_file_.assign((size_t)warps_count * (program.predicates + 1), 0);
  u8* file = register_file_.data() + (128 - (size_t)register_file_.data() % 128) % 128;
  // Later than any epoch of an earlier CTA, whose cells are still there.
  u32 epoch = 0;
  for (const Warp& w : warps) epoch = std::max(epoch, w.lane_epoch);
  warps.clear();
  warps.resize(warps_count);
  for (u32 id = 0; id < warps_count; id++) {
    Warp& w = warps[id];
    w.id = id;
    w.lane_epoch = epoch + 1;
    w.registers = file + (size_t)id * program.register_bytes;
    w.predicates = predicate_file_.data() + (size_t)id * (program.predicates + 1);
    u32 here = std::min(32u, threads - id * 32);
    w.mask = w.live = here == 32 ? ~0u : (1u << here) - 1;
    w.registers_per_thread = c.registers_per_thread;
    w.view.seen.set(id, w.now);
    w.local.assign((size_t)32 * c.local_bytes, 0xCD);
    w.register_init.assign(program.register_bytes / 128 + 1, 0);
    if (checks(CHECK_RACES)) w.loading.assign(program.register_bytes / 128 + 1, 0);
    w.predicate_init.assign(program.predicates + 1, 0);
    if (program.wgmma && checks(CHECK_RACES)) w.wgmma_registers.resize(program.register_bytes / 128 + 1);
    for (const auto& constant : program.constants) {
      w.register_init[(size_t)constant.slot >> 7] = ~0u;
      for (u32 lane = 0; lane < 32; lane++) {
        if (constant.width == 8) reg64(w, (s32)constant.slot)[lane] = (u64)constant.value;
        else reg(w, (s32)constant.slot)[lane] = (u32)constant.value;
      }
    }
    for (const auto& [number, slot] : program.specials) {
      w.register_init[(size_t)slot >> 7] = ~0u;
      fill_special(launch, block, id, (u32)number, reg(w, slot));
    }
  }
  launch.stats.ctas++;
}

bool Cta::step() {
  const LaunchConfig& c = launch.config;
  const bool randomly = c.schedule == RANDOM;
  bool any = false, all_done = true;
  for (u32 n = 0; n < warps_count; n++) {
    Warp& w = warps[randomly ? random() % warps_count : (next_warp_ + n) % warps_count];
    if (w.state == WarpState::DONE) continue;
    all_done = false;
    if (w.state == WarpState::AT_BARRIER) continue;
    if (w.state == WarpState::WAITS_REGISTERS && 32 * (w.registers_wanted - w.registers_per_thread) > free_registers_)
      continue;
    if (w.state == WarpState::YIELDED && w.yielded_at == progress) continue;
    w.state = WarpState::READY;
    any = true;
    current_warp = (s32)w.id;
    run(w, randomly ? 1 + random() % c.quantum : c.quantum);
    current_warp = -1;
    if (randomly && !queue.empty() && random() % 4 == 0) drain_one(true);
    if (launch.stats.instructions > c.max_instructions)
      FAULT("instruction-limit", "more than %llu instructions: a loop that never ends, or a limit that is too low\n%s",
            (unsigned long long)c.max_instructions, describe_waits().c_str());
  }
  if (randomly) {  // not every warp had its turn
    all_done = std::all_of(warps.begin(), warps.end(), [](const Warp& w) { return w.state == WarpState::DONE; });
    any = any || std::any_of(warps.begin(), warps.end(), [&](const Warp& w) {
      return w.state == WarpState::READY || (w.state == WarpState::YIELDED && w.yielded_at != progress);
    });
  }
  if (all_done) {
    while (drain_one(randomly)) {}
    check_leftovers();
    return true;
  }
  if (any) return false;
  if (drain_one(randomly)) return false;
  // A failed peek at a barrier also yields. Such a warp may go on without anybody's help: try it before giving up.
  if (stalled_at_ == progress) stalls_++;
  else stalls_ = 0, stalled_at_ = progress;
  bool woken = false;
  for (Warp& w : warps)
    if (w.state == WarpState::YIELDED) {
      w.yielded_at = progress - 1;
      for (Group& group : w.others) group.yielded_at = 0;
      woken = true;
    }
  if (!woken || stalls_ > 2) FAULT("deadlock", "no warp can go on\n%s", describe_waits().c_str());
  return false;
}

std::string Cta::describe_waits() {
  std::string text = printed("CTA %u (%u, %u, %u):", index, block[0], block[1], block[2]);
  for (const Warp& w : warps) {
    text += printed("\n  warp %u ", w.id);
    switch (w.state) {
      case WarpState::DONE: text += "has ended"; break;
      case WarpState::READY: text += printed("runs at {pc %d}", w.pc); break;
      case WarpState::AT_BARRIER: {
        const NamedBarrier& b = named_[w.barrier_id];
        text += printed("waits at named barrier %u, %u of %u threads arrived, {pc %d}", w.barrier_id, b.arrived, b.needed,
                       w.pc - 1);
        break;
      }
      case WarpState::WAITS_REGISTERS:
        text += printed("waits for registers: has %u, wants %u, the pool has %u for each thread of a warp, {pc %d}",
                       w.registers_per_thread, w.registers_wanted, free_registers_ / 32, w.pc);
        break;
      case WarpState::YIELDED: {
        auto found = barriers_.find(w.yield_address);
        if (found == barriers_.end()) { text += printed("waits, {pc %d}", w.yield_pc); break; }
        const Mbarrier& b = found->second;
        text += printed("waits for parity %u of mbarrier at shared+%u (phase %llu, %lld of %u arrivals missing, tx-count "
                       "%lld), {pc %d}",
                       w.yield_parity, w.yield_address - SHARED_BASE, (unsigned long long)b.phase, (long long)b.pending,
                       b.expected, (long long)b.tx, w.yield_pc);
      }
    }
  }
  return text + printed("\n  asynchronous operations queued: %zu", queue.size());
}

void Launch::run() {
  const u32 total = config.grid[0] * config.grid[1] * config.grid[2];
  u32 next = first_cta;
  std::vector<Cta*> active;
  u64 turn = 0, rng = 0x2545F4914F6CDD1Dull + config.seed;
  while (next < total || !active.empty()) {
    if (together && together->stopped) return;
    while (next < total && active.size() < std::max(1u, config.resident_ctas)) {
      Cta* fresh = nullptr;
      for (auto& cta : resident)
        if (std::find(active.begin(), active.end(), cta.get()) == active.end()) fresh = cta.get();
      if (!fresh) {
        resident.push_back(std::make_unique<Cta>(*this));
        fresh = resident.back().get();
      }
      current = fresh;
      fresh->start(next);
      next += cta_step;
      active.push_back(fresh);
    }
    if (config.schedule == RANDOM) rng ^= rng << 13, rng ^= rng >> 7, rng ^= rng << 17;
    size_t chosen = (config.schedule == RANDOM ? rng >> 11 : turn++) % active.size();
    current = active[chosen];
    if (current->step()) active.erase(active.begin() + (long)chosen);
  }
}
