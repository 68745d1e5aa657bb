// The queue of all asynchronous work; cp.async; issue of and waits for bulk and tensor copies.
#include <algorithm>
#include "machine.h"

std::pair<u32, u32> Cta::begin_async(u32 type, u32 warp, const View& view) {
  if (!checks(CHECK_RACES)) return {warps_count, 1};
  for (u32 agent = warps_count; agent < agents_.size(); agent++) {
    Agent& a = agents_[agent];
    if (a.type == type && a.warp == warp && view.seen.covers(agent, a.clock)) return {agent, ++a.clock};
  }
  agents_.push_back({type, warp, 1});
  pipes_.emplace_back();
  return {(u32)agents_.size() - 1, 1};
}

void Cta::issue(AsyncOp&& op) {
  if (launch.config.schedule == EAGER) execute(op);
  else queue.push_back(std::move(op));
}

void Cta::execute(AsyncOp& op) {
  launch.stats.async_ops++;
  switch (op.work) {
    case Work::TENSOR_LOAD: case Work::TENSOR_STORE: run_tensor_copy(op); break;
    case Work::BULK_LOAD: case Work::BULK_STORE: run_bulk(op); break;
    case Work::MMA: order_pipe(op); run_mma(op); break;
    case Work::TMEM_COPY: order_pipe(op); run_tmem_copy(op); break;
    case Work::COMMIT: {
      order_pipe(op);
      View view = pipes_[op.agent];
      arrive(op.barrier, 1, view, op.pc, agent_code(AGENT_TENSOR, op.warp), true);
      break;
    }
    case Work::COPY: run_copy(op); break;
    case Work::WGMMA: run_wgmma(op); break;
    case Work::COPY_ARRIVE: arrive(op.barrier, 1, op.view, op.pc, agent_code(AGENT_WARP, op.warp)); break;
  }
}

// What the tensor pipe of one warp does stays in order, and so do the wgmma of one warpgroup, and cp.async and the
// arrival after it.
bool Cta::eligible(size_t position) const {
  auto in_pipe = [](const AsyncOp& op) {
    return op.work == Work::MMA || op.work == Work::COMMIT || op.work == Work::TMEM_COPY;
  };
  const AsyncOp& op = queue[position];
  if (in_pipe(op)) {
    for (size_t i = 0; i < position; i++)
      if (in_pipe(queue[i]) && queue[i].warp == op.warp) return false;
  } else if (op.work == Work::WGMMA) {
    for (size_t i = 0; i < position; i++)
      if (queue[i].work == Work::WGMMA && queue[i].warp == op.warp) return false;
  } else if (op.work == Work::COPY_ARRIVE) {
    for (size_t i = 0; i < position; i++)
      if (queue[i].work == Work::COPY && queue[i].warp == op.warp && queue[i].lane == op.lane) return false;
  }
  return true;
}

bool Cta::drain_one(bool randomly) {
  if (queue.empty()) return false;
  size_t chosen = 0;
  if (randomly) {
    std::vector<size_t> candidates;
    for (size_t i = 0; i < queue.size() && i < 64; i++)
      if (eligible(i)) candidates.push_back(i);
    chosen = candidates[random() % candidates.size()];
  }
  AsyncOp op = std::move(queue[chosen]);
  queue.erase(queue.begin() + (long)chosen);
  execute(op);
  return true;
}

void Cta::issue_copy(Warp& w, const Instr& i, const s32* o, u32 m) {
  EACH_LANE(m) {
    AsyncOp op{Work::COPY};
    op.warp = w.id, op.lane = lane, op.pc = w.pc, op.group = w.copy_group[lane];
    op.shared = shared_address(w, o[0], lane, i.imm);
    op.global = lane_address(w, o[1], lane, i.b);
    op.bytes = (u32)i.a;
    op.bytes_read = o[2] >= 0 ? std::min(reg(w, o[2])[lane], op.bytes) : op.bytes;
    check_shared(op.shared, op.bytes, "cp.async");
    if (op.shared % op.bytes) fault_at("misaligned", SPACE_SHARED, op.shared, printed("cp.async of %u B", op.bytes));
    if (op.bytes_read && op.global % op.bytes)
      fault_at("misaligned", SPACE_GLOBAL, op.global, printed("cp.async of %u B", op.bytes));
    if (checks(CHECK_RACES)) {
      Actor who = actor(w);
      who.clock = PENDING;
      shadow_shared(op.shared, op.bytes, true, who);
      w.pending_copies.push_back({op.shared, op.bytes, op.group});
    }
    if (op.bytes_read) {
      global_pointer(op.global, op.bytes_read, "cp.async");
      shadow_global(op.global, op.bytes_read, false, actor(w));
    }
    issue(std::move(op));
  }
}

void Cta::run_copy(AsyncOp& op) {
  memset(&shared_[op.shared], 0, op.bytes);
  if (op.bytes_read) memcpy(&shared_[op.shared], global_pointer(op.global, op.bytes_read, "cp.async"), op.bytes_read);
  memset(&shared_init_[op.shared], 1, op.bytes);
  launch.stats.async_bytes += op.bytes;
  progress++;
}

void Cta::issue_copy_arrive(Warp& w, const Instr& i, const s32* o, u32 m) {
  if (checks(CHECK_RACES)) {
    for (const auto& copy : w.pending_copies) shared_shadow_.settle(copy.address, copy.bytes, w.id, w.now);
    w.pending_copies.clear();
  }
  EACH_LANE(m) {
    AsyncOp op{Work::COPY_ARRIVE};
    op.warp = w.id, op.lane = lane, op.pc = w.pc;
    op.barrier = shared_address(w, o[0], lane, i.imm);
    if (checks(CHECK_RACES)) op.view = w.view;
    // Without .noinc the arrival is counted in now, so that the operation as a whole leaves the count as it was.
    if (!i.a) barrier_at(op.barrier, w.pc, w.view, agent_code(AGENT_WARP, w.id), false).pending++;
    issue(std::move(op));
  }
  tick(w);
}

void Cta::wait_copies(Warp& w, const Instr& i, u32 m) {
  const bool all = i.b;
  auto complete = [&](u32 lane, u32 group) { return all || (s64)group < (s64)w.copy_group[lane] - i.a; };
  if (!queue.empty()) {
    std::deque<AsyncOp> kept;
    for (AsyncOp& op : queue)
      if (op.work == Work::COPY && op.warp == w.id && (m >> op.lane & 1) && complete(op.lane, op.group)) execute(op);
      else kept.push_back(std::move(op));
    queue.swap(kept);
  }
  if (!checks(CHECK_RACES)) return;
  u32 oldest = ~0u;
  EACH_LANE(m) oldest = std::min(oldest, w.copy_group[lane]);
  std::vector<Warp::PendingCopy> kept;
  for (const auto& copy : w.pending_copies)
    if (all || (s64)copy.group < (s64)oldest - i.a) shared_shadow_.settle(copy.address, copy.bytes, w.id, w.now);
    else kept.push_back(copy);
  w.pending_copies.swap(kept);
}

void Cta::issue_bulk(Warp& w, const Instr& i, const s32* o, u32 m) {
  const bool load = i.kind == KIND_TMA_LOAD || i.kind == KIND_BULK_LOAD;
  const bool tensor = i.kind == KIND_TMA_LOAD || i.kind == KIND_TMA_STORE;
  EACH_LANE(m) {
    AsyncOp op{tensor ? load ? Work::TENSOR_LOAD : Work::TENSOR_STORE : load ? Work::BULK_LOAD : Work::BULK_STORE};
    op.warp = w.id, op.lane = lane, op.pc = w.pc, op.group = w.bulk_group[lane];
    op.shared = shared_address(w, o[0], lane, i.imm);
    s32 at = 1;
    if (load) op.barrier = shared_address(w, o[at++], lane, i.b);
    op.global = lane_address(w, tensor ? o[at] | 1 : o[at], lane, tensor ? 0 : i.c);
    at++;
    if (tensor) {
      op.rank = (u32)i.a;
      for (u32 d = 0; d < op.rank; d++) op.coordinates[d] = (s32)reg(w, o[at + (s32)d])[lane];
      if (!load) op.reduction = (u32)i.b;
      op.gather = i.c;
    } else {
      op.bytes = reg(w, o[at])[lane];
      if (!load) op.reduction = (u32)i.a, op.type = (u32)i.b;
    }
    std::tie(op.agent, op.clock) = begin_async(load ? AGENT_LOAD : AGENT_STORE, w.id, w.view);
    if (checks(CHECK_RACES)) op.view = released(w, m);
    if (!load) w.pending_bulk.push_back({op.agent, op.clock, op.group, lane, w.pc});
    issue(std::move(op));
  }
  tick(w);
}

void Cta::wait_bulk(Warp& w, const Instr& i, u32 m) {
  auto complete = [&](u32 lane, u32 group) {
    return (m >> lane & 1) && (s64)group < (s64)w.bulk_group[lane] - i.a;
  };
  for (size_t k = 0; k < queue.size();) {
    AsyncOp& queued = queue[k];
    bool store = queued.work == Work::TENSOR_STORE || queued.work == Work::BULK_STORE;
    if (store && queued.warp == w.id && complete(queued.lane, queued.group)) {
      AsyncOp op = std::move(queued);
      queue.erase(queue.begin() + (long)k);
      execute(op);
    } else {
      k++;
    }
  }
  std::vector<Warp::PendingBulk> kept;
  for (const auto& bulk : w.pending_bulk)
    if (complete(bulk.lane, bulk.group)) w.view.set_both(bulk.agent, bulk.clock);
    else kept.push_back(bulk);
  w.pending_bulk.swap(kept);
}
