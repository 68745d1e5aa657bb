// The state of one launch: global memory, the CTAs that are resident, their warps, barriers and asynchronous work.
#pragma once
#include <atomic>
#include <mutex>
#include "state.h"

struct Launch;

class Cta {
 public:
  Launch& launch;
  u32 index = 0, block[3] = {0, 0, 0};
  u32 warps_count = 0, threads = 0;
  std::vector<Warp> warps;
  std::deque<AsyncOp> queue;
  u64 progress = 1;
  s32 current_warp = -1;
  u64 rng = 1;

  explicit Cta(Launch& owner) : launch(owner) {}
  void start(u32 linear_index);
  // Runs a slice of every warp that can run; returns whether the CTA has finished.
  bool step();
  std::string describe_waits();

 private:
  // Memory.
  std::vector<u8> shared_, shared_init_;
  Shadow shared_shadow_;
  LazyArray<LaneCell> lane_cells_, lane_byte_cells_;  // by word; by byte, for words that are split
  LazyArray<u32> tmem_;
  LazyArray<u8> tmem_init_;
  std::vector<TmemCell> tmem_cells_;
  enum : u8 { FREE, ALLOCATED, RELEASED };
  std::vector<u8> column_state_;
  std::vector<s32> column_release_pc_, column_alloc_pc_;
  bool tmem_dirty_ = true, relinquished_ = false;
  std::unordered_map<u32, Mbarrier> barriers_;
  u32 barriers_begin_ = ~0u, barriers_end_ = 0;  // all mbarriers lie between
  std::array<NamedBarrier, 17> named_;
  std::vector<Warpgroup> warpgroups_;
  std::vector<u8> register_file_;
  std::vector<u32> predicate_file_;
  u32 free_registers_ = 0;
  u32 stalls_ = 0;
  u64 stalled_at_ = 0;
  u32 next_warp_ = 0;

  // Agents: warps first, then whatever is asynchronous, chained so that an ordered successor reuses the number.
  struct Agent { u32 type, warp, clock; };
  std::vector<Agent> agents_;
  std::vector<View> pipes_;  // per agent; used by tensor pipes
  s32 name_agent(u32 agent) const { return agent_code(agents_[agent].type, agents_[agent].warp); }
  std::pair<u32, u32> begin_async(u32 type, u32 warp, const View& view);
  u32 pipe(u32 type, u32 warp);

  u32 random() { rng ^= rng << 13; rng ^= rng >> 7; rng ^= rng << 17; return (u32)(rng >> 11); }
  bool checks(u32 which) const;
  void report(const char* kind, s32 pc, s32 agent, s32 other_pc, s32 other_agent, s32 space, u64 address,
              std::string text = "", s32 other_cta = -1, u32 count = 1);
  // What a warp does from now on is not covered by what it has released or fenced so far.
  void tick(Warp& w) { w.view.seen.set(w.id, ++w.now); }
  void meet(Warp& w) { tick(w); w.met = w.now, w.touched = 0; }
  // What a signal by some lanes carries: not what the others did since the warp last met.
  View released(const Warp& w, u32 m) const {
    View view = w.view;
    if (w.touched & ~m) view.seen.limit(w.id, w.met - 1), view.async_seen.limit(w.id, w.met - 1);
    return view;
  }
  Actor actor(Warp& w, bool async = false) { return {w.id, w.now, &w.view, async, w.pc, index, false}; }

  // memory.cpp
  void check_shared(u32 address, u32 bytes, const char* what);
  void check_lanes(Warp& w, u32 lane, u32 address, u32 bytes, const u8* written);
  void check_lane_cell(LaneCell& cell, Warp& w, u32 lane, u32 address, u32 bytes, const u8* written);
  void shadow_shared(u32 address, u32 bytes, bool write, const Actor& who);
  void check_shared_init(u32 address, u32 bytes, const char* what, s32 pc, s32 agent);
  Region* region_of(u64 address, u32 bytes);
  u8* global_pointer(u64 address, u32 bytes, const char* what);
  void shadow_global(u64 address, u32 bytes, bool write, const Actor& who);
  void report_conflict(const ConflictSite& site, const Actor& who, bool write, s32 space, u64 address);
  u64 lane_address(Warp& w, s32 operand, u32 lane, s64 offset);
  u32 shared_address(Warp& w, s32 operand, u32 lane, s64 offset) { return (u32)lane_address(w, operand, lane, offset); }
  bool is_shared_window(u64 address) const;
  void lane_addresses(Warp& w, s32 operand, s64 offset, u64* out);
  u32 access(Warp& w, s32 space, const u64* addresses, u32 m, u32 bytes, bool write, u8** places);
  void access_shared(Warp& w, const u64* addresses, u32 m, u32 bytes, bool write, u8** places);
  void access_global(Warp& w, const u64* addresses, u32 m, u32 bytes, bool write, u8** places);
  void access_local(Warp& w, const u64* addresses, u32 m, u32 bytes, bool write, u8** places);
  void load(Warp& w, const Instr& i, const s32* o, u32 m);
  void store(Warp& w, const Instr& i, const s32* o, u32 m);

  // atomics.cpp
  void reduce_global(u8* target, const u8* source, u32 bytes, u32 type, u32 op);
  void atomic(Warp& w, const Instr& i, const s32* o, u32 m);
  u32 access_atomic(Warp& w, s32 space, const u64* addresses, u32 m, u32 bytes, u8** places);

  // barriers.cpp
  Mbarrier& barrier_at(u32 address, s32 pc, const View& view, s32 agent, bool async);
  void complete_if_done(u32 address, Mbarrier& barrier);
  void arrive(u32 address, s64 count, const View& view, s32 pc, s32 agent, bool async = false);
  void change_tx(u32 address, s64 bytes, bool expect, const View& view, s32 pc, s32 agent, bool async);
  void run_mbarrier(Warp& w, const Instr& i, const s32* o, u32 m);
  bool wait_mbarrier(Warp& w, const Instr& i, const s32* o, u32 m);
  bool run_named(Warp& w, const Instr& i, const s32* o, u32 m);
  void release_named(NamedBarrier& barrier);
  void leave_barriers();
  bool set_registers(Warp& w, const Instr& i);
  void fence(Warp& w, const Instr& i);
  void check_leftovers();

  // copies.cpp
  void issue(AsyncOp&& op);
  void execute(AsyncOp& op);
  bool drain_one(bool randomly);
  bool eligible(size_t position) const;
  void issue_copy(Warp& w, const Instr& i, const s32* o, u32 m);
  void issue_copy_arrive(Warp& w, const Instr& i, const s32* o, u32 m);
  void wait_copies(Warp& w, const Instr& i, u32 m);
  void issue_bulk(Warp& w, const Instr& i, const s32* o, u32 m);
  void wait_bulk(Warp& w, const Instr& i, u32 m);
  void run_tensor_copy(AsyncOp& op);
  void run_bulk(AsyncOp& op);
  void run_copy(AsyncOp& op);
  void finish_load(AsyncOp& op, u32 bytes);
  Actor async_actor(const AsyncOp& op) { return {op.agent, op.clock, &op.view, true, op.pc, index, false}; }

  // tensor.cpp
  void allocate_tmem(Warp& w, const Instr& i, const s32* o, u32 m);
  void deallocate_tmem(Warp& w, const s32* o, u32 m);
  void check_columns(u32 column, u32 count, const char* what, s32 pc, s32 agent);
  void touch_tmem(u32 quarter, u32 column, u32 count, bool write, u32 agent, u32 clock, u32 completed,
                  const View& view, s32 pc);
  void check_tmem_order(u64 place, const TmemAccess& earlier, const char* what, const char* wait, u32 agent,
                        const View& view, s32 pc);
  void move_tmem(Warp& w, const Instr& i, const s32* o, u32 m);
  void move_tmem_row(Warp& w, bool load, u32 at, u32 thread, const s32* registers, u32 count);
  void note_tmem_move(Warp& w, const TmemColumns& columns, bool load, const s32* registers, u32 count);
  template <class Visit> void each_tmem_cell(const TmemColumns& columns, Visit visit);
  void wait_tmem(Warp& w, bool stores);
  void complete_load(Warp& w, u32 id, bool waited);
  void use_loading_registers(Warp& w, const Instr& i, const s32* o);
  void issue_mma(Warp& w, const Instr& i, const s32* o, u32 m);
  void run_mma(AsyncOp& op);
  void run_tmem_copy(AsyncOp& op);
  void read_operand(const Operand& out, u64 descriptor, u32 rows, bool mn_major, u32 format, AsyncOp& op);
  void read_tmem_operand(const Operand& out, u32 rows, u32 format, AsyncOp& op);
  const u8* read_chunk(u32 address, u32 swizzle, const Actor& who, const char* what);
  void order_pipe(AsyncOp& op);
  void fence_tcgen05(Warp& w, bool after);

  // sm90.cpp
  void load_matrix(Warp& w, const Instr& i, const s32* o, u32 m);
  void store_matrix(Warp& w, const Instr& i, const s32* o, u32 m);
  void move_matrix(Warp& w, const s32* o, u32 m);
  void multiply_warp(Warp& w, const Instr& i, const s32* o, u32 m);
  void issue_wgmma(Warp& w, const Instr& i, const s32* o);
  void check_wgmma_operands(Warp& w, const Instr& i, const s32* o, bool accumulate);
  void run_wgmma(AsyncOp& op);
  template <class Visit> void each_wgmma_pair(u32 first_warp, u32 row, u32 n, const s32* o, Visit visit);
  void read_wgmma_fragment(f32* out, u32 group, const s32* operands, u32 format);
  bool wait_wgmma(Warp& w, const Instr& i);
  void check_wgmma_registers(Warp& w, const Instr& i, const s32* o);

  // warp.cpp
  enum class Outcome { CONTINUE, STOP };
  void run(Warp& w, u64 budget);
  Outcome run_other(Warp& w, const Instr& i, const s32* o, u32 m);
  void check_registers(Warp& w, const Instr& i, const s32* o, u32 m);

  // groups.cpp
  bool select_group(Warp& w);
  bool rendezvous(Warp& w, u32 m, u32 wanted, const char* what);
  bool yield_group(Warp& w);
  void exit_lanes(Warp& w, u32 m);

  // lanes.cpp
  void shuffle(Warp& w, const Instr& i, const s32* o, u32 m);
  void run_vote(Warp& w, const Instr& i, const s32* o, u32 m);
  void match(Warp& w, const Instr& i, const s32* o, u32 m);
  void reduce_lanes(Warp& w, const Instr& i, const s32* o, u32 m);
  void select(Warp& w, const Instr& i, const s32* o, u32 m);
  void pack(Warp& w, const Instr& i, const s32* o, u32 m);
  void unpack(Warp& w, const Instr& i, const s32* o, u32 m);

  u32* reg(Warp& w, s32 slot) { return (u32*)(w.registers + (slot & ~1)); }
  u64* reg64(Warp& w, s32 slot) { return (u64*)(w.registers + (slot & ~1)); }
  u32 uniform(Warp& w, s32 slot, u32 m, const char* what);
  u64 uniform64(Warp& w, s32 slot, const char* what);
};

// What the workers of a launch share besides global memory. Reductions and atomics take the lock.
struct Together {
  std::mutex lock;
  std::atomic<bool> stopped{false};
};

// The CTAs first, first + step, ... of a launch, run by one worker.
struct Launch {
  const Program& program;
  LaunchConfig config;
  std::vector<Region>& regions;
  Findings& findings;
  LaunchStats stats{};
  std::vector<u64> profile;
  Region* last_region = nullptr;
  std::vector<std::unique_ptr<Cta>> resident;
  Cta* current = nullptr;

  u32 first_cta, cta_step;
  Together* together;  // null if there is one worker

  Launch(const Program& p, const LaunchConfig& c, std::vector<Region>& r, Findings& f, u32 first, u32 step, Together* t)
      : program(p), config(c), regions(r), findings(f), profile(p.instructions.size(), 0), first_cta(first),
        cta_step(step), together(t) {}
  void run();
  std::unique_lock<std::mutex> exclusive() {
    return together ? std::unique_lock<std::mutex>(together->lock) : std::unique_lock<std::mutex>();
  }
};

// workers.cpp: runs a launch by config.workers threads; returns whether it ended without a fault.
bool run_workers(const Program& program, const LaunchConfig& config, std::vector<Region>& regions, Findings& findings,
                 LaunchStats& stats, std::vector<u64>& profile);

inline bool Cta::checks(u32 which) const { return launch.config.checks & which; }
inline u32 first_lane(u32 mask) { return (u32)__builtin_ctz(mask); }
// The empty branch keeps an `else` after the macro from binding to its `if`.
#define EACH_LANE(mask) for (u32 lane = 0; lane < 32; lane++) if (!((mask) >> lane & 1)) {} else
void check_aligned(u64 address, u32 bytes, s32 space, const char* what);  // memory.cpp
TensorMap decode_tensor_map(const u64* words, u32 rank);
inline u32 swizzle_address(u32 address, u32 mode) {
  return mode == 0 ? address : address ^ (((address >> 7) & ((1u << mode) - 1)) << 4);
}
// The accesses of neighbouring lanes to adjacent bytes as one.
template <class Visit> void each_run(const u64* addresses, u32 m, u32 bytes, Visit visit) {
  for (u32 lane = 0; lane < 32;) {
    u32 end = lane + 1;
    if (m >> lane & 1) {
      while (end < 32 && (m >> end & 1) && addresses[end] == addresses[end - 1] + bytes) end++;
      visit(addresses[lane], (end - lane) * bytes);
    }
    lane = end;
  }
}
