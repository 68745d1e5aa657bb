// Happens-before: vector clocks, and the shadow memory that remembers who touched what last.
//
// An agent is whatever runs in program order by itself: a warp, the tensor pipe of a warp, one asynchronous copy.
// Every agent has two clocks. `seen` is ordinary happens-before. `async_seen` is the part of it that the asynchronous
// proxy may rely on: a generic-proxy write enters it only through fence.proxy.async.
#pragma once
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

// A granule of memory, or a block of four that were always accessed together. All zero means: never touched in this
// launch. Agents are stored plus one.
struct Cell {
  u32 write_agent, write_clock, write_cta;
  u32 write_pc : 29, write_async : 1, write_atomic : 1;
  u32 split : 1;  // of a block: its granules are kept apart
  u32 read_agent, read_clock, read_cta;
  s32 read_pc;
};
static_assert(sizeof(Cell) == 32, "two cells a cache line");

enum class Conflict { READ_AFTER_WRITE, WRITE_AFTER_WRITE, WRITE_AFTER_READ, PROXY, NOT_WAITED };
struct ConflictSite { Conflict kind; u32 agent; s32 pc; u32 cta; u64 granule; u32 granules; };

class Shadow {
 public:
  // 4 bytes in shared memory: 16 gave false races, the forward's row statistics start at 12 mod 16. Global tensors of
  // 16-bit elements use 16, else the shadow of O_partial alone would take a gigabyte.
  explicit Shadow(u32 granule = 4) : granule_(granule) {}

  void reset(u64 bytes) {
    const u64 blocks = (bytes / granule_ + 2) / BLOCK + 1;
    blocks_.clear(blocks), cells_.reserve(blocks * BLOCK);
    touched_.assign(blocks * BLOCK / PAGE + 1, 0);
    readers_.clear();
    free_.clear();
  }
  bool empty() const { return touched_.empty(); }
  u32 granule() const { return granule_; }

  // `report` takes a ConflictSite, the actor and whether it writes.
  template <class Report> void access(u64 address, u32 bytes, bool write, const Actor& actor, const Report& report) {
    const u64 end = (address + bytes - 1) / granule_ + 1;
    for (u64 granule = address / granule_; granule < end;) {
      Cell& block = blocks_[granule / BLOCK];
      touched_[granule / PAGE] = 1;
      if (granule % BLOCK || end - granule < BLOCK) {
        if (!block.split) split(block, granule / BLOCK);
        visit(cells_[granule], granule, 1, write, actor, report);
        granule++;
        continue;
      }
      // Copies and matrix operands come in whole blocks.
      if (!block.split) {
        visit(block, granule, BLOCK, write, actor, report);
      } else {
        for (u32 k = 0; k < BLOCK; k++) visit(cells_[granule + k], granule + k, 1, write, actor, report);
        if (write) block = cells_[granule];
      }
      granule += BLOCK;
    }
  }
  // Conflicts with what another worker, hence another CTA, did to the same memory in the same launch.
  template <class Found> void compare(const Shadow& other, u64 bytes, Found found) const {
    const u64 count = (bytes - 1) / granule_ + 1;
    for (u64 granule = 0; granule < count; granule++) {
      if (granule % PAGE == 0 && !(touched_[granule / PAGE] && other.touched_[granule / PAGE])) {
        granule += PAGE - 1;
        continue;
      }
      const Cell &a = at(granule), &b = other.at(granule);
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
      Cell& cell = at(granule);
      if (cell.write_agent == agent + 1 && cell.write_clock == PENDING) cell.write_clock = clock;
    }
  }

 private:
  static constexpr u32 MANY = ~0u, BLOCK = 4, PAGE = 1024;
  u32 granule_;
  LazyArray<Cell> blocks_, cells_;  // the second holds the granules of blocks that are split
  std::vector<u8> touched_;  // by PAGE granules
  std::vector<std::vector<Access>> readers_;
  std::vector<u32> free_;

  Cell& at(u64 granule) const {
    Cell& block = blocks_[granule / BLOCK];
    return block.split ? cells_[granule] : block;
  }
  void split(Cell& block, u64 index) {
    for (u32 k = 0; k < BLOCK; k++) {
      Cell& cell = cells_[index * BLOCK + k];
      cell = block;
      if (!k || block.read_agent != MANY) continue;
      cell.read_clock = new_readers();
      readers_[cell.read_clock] = readers_[block.read_clock];
    }
    block.split = 1;
  }
  u32 new_readers() {
    if (free_.empty()) {
      readers_.emplace_back();
      return (u32)readers_.size() - 1;
    }
    const u32 slot = free_.back();
    free_.pop_back();
    return slot;
  }
  template <class Report>
  void visit(Cell& cell, u64 granule, u32 granules, bool write, const Actor& actor, const Report& found) {
    auto report = [&](ConflictSite site) {
      site.granule = granule, site.granules = granules;
      found(site, actor, write);
    };
    if (cell.write_agent && !follows_write(cell, actor)) check_write(cell, write, actor, report);
    if (write) {
      if (cell.read_agent) check_reads(cell, actor, report);
      cell.write_agent = actor.agent + 1, cell.write_clock = actor.clock, cell.write_pc = (u32)actor.pc;
      cell.write_cta = actor.cta, cell.write_async = actor.async, cell.write_atomic = actor.atomic;
    } else {
      note_read(cell, actor);
    }
  }
  static Seen written(const Cell& cell) { return {cell.write_agent - 1, (s32)cell.write_pc, cell.write_cta}; }
  Seen read(const Cell& cell) const {
    if (cell.read_agent != MANY) return {cell.read_agent - 1, cell.read_pc, cell.read_cta};
    const Access& first = readers_[cell.read_clock][0];
    return {first.agent, first.pc, cell.read_cta};
  }
  // The common case: the write is ordered before the actor, and published to it.
  static bool follows_write(const Cell& cell, const Actor& actor) {
    const u32 writer = cell.write_agent - 1;
    if (cell.write_cta != actor.cta || !actor.view->seen.covers(writer, cell.write_clock)) return false;
    return !actor.async || cell.write_async || actor.view->async_seen.covers(writer, cell.write_clock);
  }
  template <class Report>
  static void check_write(const Cell& cell, bool write, const Actor& actor, const Report& report) {
    u32 writer = cell.write_agent - 1;
    auto site = [&](Conflict kind) { return ConflictSite{kind, writer, (s32)cell.write_pc, cell.write_cta, 0, 0}; };
    Conflict race = write ? Conflict::WRITE_AFTER_WRITE : Conflict::READ_AFTER_WRITE;
    if (actor.atomic && cell.write_atomic) return;
    if (cell.write_cta != actor.cta) return report(site(race));
    if (writer == actor.agent && !actor.async) {
      if (cell.write_clock == PENDING && actor.clock != PENDING) report(site(Conflict::NOT_WAITED));
      return;
    }
    if (!actor.view->seen.covers(writer, cell.write_clock)) return report(site(race));
    if (actor.async && !cell.write_async && !actor.view->async_seen.covers(writer, cell.write_clock))
      report(site(Conflict::PROXY));
  }
  template <class Report> void check_reads(Cell& cell, const Actor& actor, const Report& report) {
    auto check = [&](const Access& read, u32 cta) {
      if (actor.atomic && read.agent == actor.agent) return;
      bool ordered = cta == actor.cta && (read.agent == actor.agent || actor.view->seen.covers(read.agent, read.clock));
      if (!ordered) report(ConflictSite{Conflict::WRITE_AFTER_READ, read.agent, read.pc, cta, 0, 0});
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
      const u32 slot = new_readers();
      readers_[slot] = {before, now};
      cell.read_agent = MANY, cell.read_clock = slot;
      return;
    }
    if (cell.read_agent == MANY) { readers_[cell.read_clock].clear(); free_.push_back(cell.read_clock); }
    cell.read_agent = now.agent + 1, cell.read_clock = now.clock, cell.read_pc = now.pc, cell.read_cta = actor.cta;
  }
};
