// Happens-before: vector clocks, and the shadow memory that remembers who touched what last.
//
// An agent is whatever runs in program order by itself: a warp, the tensor pipe of a warp, one asynchronous copy.
// Every agent has two clocks. `seen` is ordinary happens-before. `async_seen` is the part of it that the asynchronous
// proxy may rely on: a generic-proxy write enters it only through fence.proxy.async.
#pragma once
#include <cstdlib>
#include <functional>
#include <memory>
#include "common.h"

class Clock {
 public:
  u32 get(u32 agent) const { return agent < values_.size() ? values_[agent] : 0; }
  void set(u32 agent, u32 value) {
    if (agent >= values_.size()) values_.resize(agent + 1, 0);
    values_[agent] = value;
  }
  void join(const Clock& other) {
    if (values_.size() < other.values_.size()) values_.resize(other.values_.size(), 0);
    for (size_t i = 0; i < other.values_.size(); i++)
      if (other.values_[i] > values_[i]) values_[i] = other.values_[i];
  }
  // What both know.
  void meet(const Clock& other) {
    if (values_.size() > other.values_.size()) values_.resize(other.values_.size());
    for (size_t i = 0; i < values_.size(); i++)
      if (other.values_[i] < values_[i]) values_[i] = other.values_[i];
  }
  void clear() { values_.clear(); }
  void limit(u32 agent, u32 value) {
    if (agent < values_.size() && values_[agent] > value) values_[agent] = value;
  }
  bool covers(u32 agent, u32 value) const { return value <= get(agent); }

 private:
  std::vector<u32> values_;
};

// With the check of tcgen05 fences there are two more: `tensor_seen` is what tcgen05 operations may rely on, `published`
// what tcgen05.fence::before_thread_sync or a commit has released; tcgen05.fence::after_thread_sync takes the second
// into the first.
struct View {
  Clock seen, async_seen, tensor_seen, published;
  void join(const View& other) {
    seen.join(other.seen);
    async_seen.join(other.async_seen);
    published.join(other.published);
  }
  void meet(const View& other) { seen.meet(other.seen); async_seen.meet(other.async_seen); }
  void set_both(u32 agent, u32 value) { seen.set(agent, value); async_seen.set(agent, value); }
  void clear() { seen.clear(); async_seen.clear(); tensor_seen.clear(); published.clear(); }
};

// The time of an access that has been issued but not waited for: no view covers it.
constexpr u32 PENDING = 0x7fffffff;

struct Actor { u32 agent, clock; const View* view; bool async; s32 pc; u32 cta; bool atomic; };
struct Access { u32 agent, clock; s32 pc; };

// 4 bytes of memory. All zero means: never touched in this launch. Agents are stored plus one.
struct Cell {
  u32 write_agent, write_clock;
  s32 write_pc;
  u32 write_cta;
  u32 read_agent, read_clock;
  s32 read_pc;
  u32 read_cta;
  u8 write_async, write_atomic;
};

enum class Conflict { READ_AFTER_WRITE, WRITE_AFTER_WRITE, WRITE_AFTER_READ, PROXY, NOT_WAITED };
struct ConflictSite { Conflict kind; u32 agent; s32 pc; u32 cta; u64 granule; };

class Shadow {
 public:
  // 4 bytes in shared memory: 16 gave false races, the forward's row statistics start at 12 mod 16. Global tensors of
  // 16-bit elements use 16, else the shadow of O_partial alone would take a gigabyte.
  explicit Shadow(u32 granule = 4) : granule_(granule) {}
  using Report = std::function<void(const ConflictSite&, const Actor&, bool write)>;

  void reset(u64 bytes) {
    // calloc: pages that no access touches are never made.
    cells_.reset((Cell*)calloc(bytes / granule_ + 2, sizeof(Cell)));
    readers_.clear();
    free_.clear();
  }
  bool empty() const { return !cells_; }
  u32 granule() const { return granule_; }

  void access(u64 address, u32 bytes, bool write, const Actor& actor, const Report& report) {
    u64 last = (address + bytes - 1) / granule_;
    for (u64 granule = address / granule_; granule <= last; granule++) {
      Cell& cell = cells_.get()[granule];
      check_write(cell, granule, write, actor, report);
      if (write) {
        check_reads(cell, granule, actor, report);
        cell.write_agent = actor.agent + 1, cell.write_clock = actor.clock, cell.write_pc = actor.pc;
        cell.write_cta = actor.cta, cell.write_async = actor.async, cell.write_atomic = actor.atomic;
      } else {
        note_read(cell, actor);
      }
    }
  }
  // Conflicts with what another worker, hence another CTA, did to the same memory in the same launch.
  template <class Found> void compare(const Shadow& other, u64 bytes, Found found) const {
    for (u64 granule = 0; granule <= (bytes - 1) / granule_; granule++) {
      const Cell &a = cells_.get()[granule], &b = other.cells_.get()[granule];
      if (a.write_agent && b.write_agent && !(a.write_atomic && b.write_atomic))
        found(Conflict::WRITE_AFTER_WRITE, granule, written(a), written(b));
      else if (a.write_agent && b.read_agent)
        found(Conflict::READ_AFTER_WRITE, granule, other.read(b), written(a));
      else if (a.read_agent && b.write_agent)
        found(Conflict::WRITE_AFTER_READ, granule, written(b), read(a));
    }
  }
  struct Seen { u32 agent; s32 pc; u32 cta; };
  // A pending write of `agent` has completed at `clock`.
  void settle(u64 address, u32 bytes, u32 agent, u32 clock) {
    for (u64 granule = address / granule_; granule <= (address + bytes - 1) / granule_; granule++) {
      Cell& cell = cells_.get()[granule];
      if (cell.write_agent == agent + 1 && cell.write_clock == PENDING) cell.write_clock = clock;
    }
  }

 private:
  static constexpr u32 MANY = ~0u;
  struct Release { void operator()(Cell* cells) const { free(cells); } };
  u32 granule_;
  std::unique_ptr<Cell, Release> cells_;
  std::vector<std::vector<Access>> readers_;
  std::vector<u32> free_;

  static Seen written(const Cell& cell) { return {cell.write_agent - 1, cell.write_pc, cell.write_cta}; }
  Seen read(const Cell& cell) const {
    if (cell.read_agent != MANY) return {cell.read_agent - 1, cell.read_pc, cell.read_cta};
    const Access& first = readers_[cell.read_clock][0];
    return {first.agent, first.pc, cell.read_cta};
  }
  static void check_write(const Cell& cell, u64 granule, bool write, const Actor& actor, const Report& report) {
    if (!cell.write_agent) return;
    u32 writer = cell.write_agent - 1;
    auto site = [&](Conflict kind) { return ConflictSite{kind, writer, cell.write_pc, cell.write_cta, granule}; };
    Conflict race = write ? Conflict::WRITE_AFTER_WRITE : Conflict::READ_AFTER_WRITE;
    if (actor.atomic && cell.write_atomic) return;
    if (cell.write_cta != actor.cta) return report(site(race), actor, write);
    if (writer == actor.agent && !actor.async) {
      if (cell.write_clock == PENDING && actor.clock != PENDING) report(site(Conflict::NOT_WAITED), actor, write);
      return;
    }
    if (!actor.view->seen.covers(writer, cell.write_clock)) return report(site(race), actor, write);
    if (actor.async && !cell.write_async && !actor.view->async_seen.covers(writer, cell.write_clock))
      report(site(Conflict::PROXY), actor, write);
  }
  void check_reads(Cell& cell, u64 granule, const Actor& actor, const Report& report) {
    if (!cell.read_agent) return;
    auto check = [&](const Access& read, u32 cta) {
      if (actor.atomic && read.agent == actor.agent) return;
      bool ordered = cta == actor.cta && (read.agent == actor.agent || actor.view->seen.covers(read.agent, read.clock));
      if (!ordered) report({Conflict::WRITE_AFTER_READ, read.agent, read.pc, cta, granule}, actor, true);
    };
    if (cell.read_agent == MANY) {
      for (const Access& read : readers_[cell.read_clock]) check(read, cell.read_cta);
      readers_[cell.read_clock].clear();
      free_.push_back(cell.read_clock);
    } else {
      check({cell.read_agent - 1, cell.read_clock, cell.read_pc}, cell.read_cta);
    }
    cell.read_agent = 0;
  }
  void note_read(Cell& cell, const Actor& actor) {
    Access now{actor.agent, actor.clock, actor.pc};
    auto replaces = [&](const Access& read) {
      return read.agent == now.agent || actor.view->seen.covers(read.agent, read.clock);
    };
    if (cell.read_agent == MANY && cell.read_cta == actor.cta) {
      auto& reads = readers_[cell.read_clock];
      for (Access& read : reads)
        if (replaces(read)) { read = now; return; }
      reads.push_back(now);
      return;
    }
    Access before{cell.read_agent - 1, cell.read_clock, cell.read_pc};
    // Readers of another CTA: the latest one stands for all, or K and V would collect every CTA of the grid.
    if (cell.read_agent && cell.read_agent != MANY && cell.read_cta == actor.cta && !replaces(before)) {
      u32 slot;
      if (free_.empty()) { slot = (u32)readers_.size(); readers_.emplace_back(); }
      else { slot = free_.back(); free_.pop_back(); }
      readers_[slot] = {before, now};
      cell.read_agent = MANY, cell.read_clock = slot;
      return;
    }
    if (cell.read_agent == MANY) { readers_[cell.read_clock].clear(); free_.push_back(cell.read_clock); }
    cell.read_agent = now.agent + 1, cell.read_clock = now.clock, cell.read_pc = now.pc, cell.read_cta = actor.cta;
  }
};
