// mbarriers, named barriers, proxy fences and the register pool of setmaxnreg.
#include <algorithm>
#include "machine.h"

// Every use of an mbarrier must come after its initialisation: by a thread, ordinary happens-before; by the
// asynchronous proxy (copies, tcgen05.commit), a fence as well.
Mbarrier& Cta::barrier_at(u32 address, s32 pc, const View& view, s32 agent, bool async) {
  auto found = barriers_.find(address);
  if (found == barriers_.end())
    fault_at("barrier-misuse", SPACE_SHARED, address, "no mbarrier has been initialised here");
  Mbarrier& barrier = found->second;
  if (!checks(CHECK_RACES)) return barrier;
  if (!view.seen.covers(barrier.init_agent, barrier.init_clock))
    report("shared-race", pc, agent, barrier.init_pc, name_agent(barrier.init_agent), SPACE_SHARED, address,
           "use of an mbarrier, not ordered after its initialisation");
  else if (async && !barrier.fenced && !view.async_seen.covers(barrier.init_agent, barrier.init_clock))
    report("missing-proxy-fence", pc, agent, barrier.init_pc, name_agent(barrier.init_agent), SPACE_SHARED, address,
           "asynchronous use of an mbarrier whose initialisation no fence.mbarrier_init published");
  return barrier;
}

void Cta::complete_if_done(u32 address, Mbarrier& barrier) {
  if (barrier.pending < 0)
    fault_at("barrier-misuse", SPACE_SHARED, address, printed("more than the %u expected arrivals", barrier.expected));
  if (barrier.pending || barrier.tx) return;
  barrier.phase++;
  barrier.pending = barrier.expected;
  std::swap(barrier.completed, barrier.arriving);
  barrier.arriving.clear();
  progress++;
}

void Cta::arrive(u32 address, s64 count, const View& view, s32 pc, s32 agent, bool async) {
  Mbarrier& barrier = barrier_at(address, pc, view, agent, async);
  if (checks(CHECK_RACES)) barrier.arriving.join(view);
  barrier.pending -= count;
  progress++;
  complete_if_done(address, barrier);
}

void Cta::change_tx(u32 address, s64 bytes, bool expect, const View& view, s32 pc, s32 agent, bool async) {
  Mbarrier& barrier = barrier_at(address, pc, view, agent, async);
  barrier.tx += expect ? bytes : -bytes;
  constexpr s64 LIMIT = (1 << 20) - 1;  // range of the tx-count
  if (barrier.tx > LIMIT || barrier.tx < -LIMIT)
    fault_at("barrier-misuse", SPACE_SHARED, address, printed("tx-count %lld out of range", (long long)barrier.tx));
  if (expect) return;
  if (checks(CHECK_RACES)) barrier.arriving.join(view);
  progress++;
  complete_if_done(address, barrier);
}

void Cta::run_mbarrier(Warp& w, const Instr& i, const s32* o, u32 m) {
  const s32 agent = agent_code(AGENT_WARP, w.id);
  EACH_LANE(m) {
    u32 address = shared_address(w, o[0], lane, i.imm);
    check_shared(address, 8, "mbarrier operation");
    if (address % 8) fault_at("misaligned", SPACE_SHARED, address, "mbarrier not at a multiple of 8 B");
    switch (i.kind) {
      case KIND_MB_INIT: {
        if (barriers_.count(address))
          report("barrier-misuse", w.pc, agent, barriers_[address].init_pc, -1, SPACE_SHARED, address,
                 "initialised while live");
        u32 count = reg(w, o[1])[lane];
        if (!count || count > (1u << 20) - 1)
          fault_at("barrier-misuse", SPACE_SHARED, address, printed("initialised for %u arrivals", count));
        shadow_shared(address, 8, true, actor(w));
        memset(&shared_init_[address], 1, 8);
        Mbarrier barrier;
        barrier.expected = count, barrier.pending = count;
        barrier.init_agent = w.id, barrier.init_clock = w.now, barrier.init_pc = w.pc;
        barriers_[address] = barrier;
        barriers_begin_ = std::min(barriers_begin_, address), barriers_end_ = std::max(barriers_end_, address + 8);
        progress++;
        break;
      }
      case KIND_MB_INVAL:
        barrier_at(address, w.pc, w.view, agent, false);
        barriers_.erase(address);
        break;
      case KIND_MB_ARRIVE: {
        Mbarrier& barrier = barrier_at(address, w.pc, w.view, agent, false);
        if (o[1] >= 0) reg64(w, o[1])[lane] = barrier.phase;
        arrive(address, reg(w, o[2])[lane], w.touched & ~m ? released(w, m) : w.view, w.pc, agent);
        break;
      }
      case KIND_MB_ARRIVE_TX: {
        Mbarrier& barrier = barrier_at(address, w.pc, w.view, agent, false);
        if (o[1] >= 0) reg64(w, o[1])[lane] = barrier.phase;
        change_tx(address, reg(w, o[2])[lane], true, w.view, w.pc, agent, false);
        arrive(address, 1, w.touched & ~m ? released(w, m) : w.view, w.pc, agent);
        break;
      }
      case KIND_MB_EXPECT_TX: change_tx(address, reg(w, o[1])[lane], true, w.view, w.pc, agent, false); break;
    }
  }
  tick(w);
}

// Returns whether every lane saw its phase completed.
bool Cta::wait_mbarrier(Warp& w, const Instr& i, const s32* o, u32 m) {
  u32 done = 0, last_address = ~0u;
  u64 last_token = 0;
  bool completed = false;
  EACH_LANE(m) {
    const u32 address = shared_address(w, o[0], lane, i.imm);
    const u64 token = i.a ? reg(w, o[2])[lane] : reg64(w, o[2])[lane];
    if (address != last_address || token != last_token) {  // all lanes usually wait for the same
      last_address = address, last_token = token;
      Mbarrier& barrier = barrier_at(address, w.pc, w.view, agent_code(AGENT_WARP, w.id), false);
      completed = i.a ? (barrier.phase & 1) != (token & 1) : barrier.phase != token;
      if (completed && checks(CHECK_RACES)) w.view.join(barrier.completed);
    }
    if (completed) {
      done |= 1u << lane;
    } else {
      w.yield_address = address;
      w.yield_parity = (u32)token & 1;
    }
  }
  if (o[1] >= 0) w.predicates[o[1]] = (w.predicates[o[1]] & ~m) | done;
  return done == m;
}

void Cta::release_named(NamedBarrier& barrier) {
  for (u32 id : barrier.waiting) {
    warps[id].state = WarpState::READY;
    if (checks(CHECK_RACES)) warps[id].view.join(barrier.view);
  }
  for (const auto& target : barrier.targets) {
    Warp& w = warps[target.warp];
    if (target.op == 0) {
      EACH_LANE(target.mask) reg(w, target.slot)[lane] = barrier.reduced;
    } else {
      bool value = target.op == 1 ? barrier.reduced == barrier.needed : barrier.reduced > 0;
      w.predicates[target.slot] = (w.predicates[target.slot] & ~target.mask) | (value ? target.mask : 0);
    }
  }
  s32 pc = barrier.pc;
  barrier = NamedBarrier();
  barrier.pc = pc;
  progress++;
}

// A warp has ended: barriers of the whole CTA wait for one less, as the CUDA programming guide says of __syncthreads.
void Cta::leave_barriers() {
  for (NamedBarrier& barrier : named_) {
    if (!barrier.arrived || !barrier.whole) continue;
    barrier.needed -= 32;
    if (barrier.arrived == barrier.needed) release_named(barrier);
  }
}

// Returns whether the warp goes on at once.
bool Cta::run_named(Warp& w, const Instr& i, const s32* o, u32 m) {
  enum { SYNC, ARRIVE, RED };
  u32 id = uniform(w, o[0], m, "barrier number");
  const u32 ended = (u32)std::count_if(warps.begin(), warps.end(), [](const Warp& x) { return x.state == WarpState::DONE; });
  u32 count = o[1] >= 0 ? uniform(w, o[1], m, "barrier thread count") : (warps_count - ended) * 32;
  if (id > 16 || !count || count % 32 || count > (threads + 31) / 32 * 32)
    FAULT("barrier-misuse", "barrier %u for %u threads", id, count);
  if (i.a == ARRIVE && o[1] < 0) FAULT("barrier-misuse", "bar.arrive without a thread count");
  NamedBarrier& barrier = named_[id];
  if (barrier.arrived && barrier.needed != count)
    FAULT("barrier-misuse", "barrier %u used for %u threads while %u are expected", id, count, barrier.needed);
  for (u32 waiting : barrier.waiting)
    if (waiting == w.id) FAULT("barrier-misuse", "warp %u arrives twice at barrier %u", w.id, id);
  barrier.needed = count;
  barrier.whole = o[1] < 0;
  barrier.arrived += 32;
  barrier.pc = w.pc;
  progress++;
  if (checks(CHECK_RACES)) barrier.view.join(w.view);
  if (i.a == ARRIVE) tick(w);
  else meet(w);
  if (i.a == RED) {
    u32 truth = i.c ? ~w.predicates[o[2]] : w.predicates[o[2]];
    barrier.reduced += (u32)__builtin_popcount(truth & m) + (i.b == 1 ? 32 - (u32)__builtin_popcount(m) : 0);
    if (o[3] >= 0) barrier.targets.push_back({w.id, o[3], (u32)i.b, m});
  }
  w.pc++;
  if (i.a != ARRIVE) {
    w.state = WarpState::AT_BARRIER;
    w.barrier_id = id;
    barrier.waiting.push_back(w.id);
  }
  if (barrier.arrived > barrier.needed) FAULT("barrier-misuse", "barrier %u: more arrivals than its threads", id);
  if (barrier.arrived == barrier.needed) release_named(barrier);
  return w.state == WarpState::READY;
}

// setmaxnreg: giving back never blocks, taking blocks until the CTA's pool holds enough.
bool Cta::set_registers(Warp& w, const Instr& i) {
  enum { DECREASE, INCREASE };
  u32 wanted = (u32)i.imm;
  if (i.a == DECREASE) {
    if (wanted > w.registers_per_thread)
      FAULT("register-budget", "setmaxnreg.dec to %u by a warp that has %u", wanted, w.registers_per_thread);
    free_registers_ += 32 * (w.registers_per_thread - wanted);
    w.registers_per_thread = wanted;
    progress++;
    return true;
  }
  if (wanted < w.registers_per_thread)
    FAULT("register-budget", "setmaxnreg.inc to %u by a warp that has %u", wanted, w.registers_per_thread);
  u32 missing = 32 * (wanted - w.registers_per_thread);
  if (missing > free_registers_) {
    w.state = WarpState::WAITS_REGISTERS;
    w.registers_wanted = wanted;
    return false;
  }
  free_registers_ -= missing;
  w.registers_per_thread = wanted;
  progress++;
  return true;
}

void Cta::fence(Warp& w, const Instr& i) {
  if (!checks(CHECK_RACES)) return;
  if (i.kind == KIND_FENCE_PROXY) {
    w.view.async_seen.join(w.view.seen);
    tick(w);
    return;
  }
  for (auto& [address, barrier] : barriers_)
    if (w.view.seen.covers(barrier.init_agent, barrier.init_clock)) barrier.fenced = true;
}

void Cta::check_leftovers() {
  const s32 none = -1;
  for (u32 column = 0; column < TMEM_COLUMNS; column++)
    if (column_state_[column] == ALLOCATED) {
      report("tmem-leak", column_alloc_pc_[column], none, none, none, SPACE_TMEM, column,
             "allocated here and not deallocated when the CTA ended");
      break;
    }
  for (u32 id = 0; id < named_.size(); id++)
    if (named_[id].arrived)
      report("barrier-misuse", named_[id].pc, none, none, none, SPACE_NONE, 0,
             printed("named barrier %u left with %u of %u arrivals", id, named_[id].arrived, named_[id].needed));
  for (auto& [address, barrier] : barriers_)
    if (barrier.tx)
      report("leftover-transactions", barrier.init_pc, none, none, none, SPACE_SHARED, address,
             printed("tx-count %lld when the CTA ended", (long long)barrier.tx));
  for (const Warpgroup& group : warpgroups_)
    if (!group.issuing.empty())
      report("divergence", group.issuing[0].pc, agent_code(AGENT_WARP, group.issuing[0].warp), none, none, SPACE_NONE, 0,
             printed("wgmma by the warps %x of its warpgroup only", group.arrived[0]));
  for (const Warp& w : warps)
    if (w.wgmma_done != w.wgmma_issued && checks(CHECK_RACES))
      report("wgmma-not-waited", w.pc, agent_code(AGENT_WARP, w.id), none, none, SPACE_NONE, 0,
             printed("%u wgmma in flight when the warp ended", w.wgmma_issued - w.wgmma_done));
  for (const Warp& w : warps)
    if (!w.pending_bulk.empty())
      report("leftover-transactions", w.pending_bulk[0].pc, agent_code(AGENT_WARP, w.id), none, none, SPACE_NONE, 0,
             "bulk store that no cp.async.bulk.wait_group waited for: its shared memory may be gone");
}
