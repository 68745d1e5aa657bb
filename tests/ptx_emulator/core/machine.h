// The state of one launch: global memory, the CTAs that are resident, their warps, barriers and asynchronous work.
#pragma once
#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include "clocks.h"
#include "matmul.h"
#include "kinds.inc"

// Lane-wise instructions: registers, predicates, operands, active lanes. alu.cpp; the kinds from FIRST_LANE_KIND on.
using LaneFunction = void (*)(u8*, u32*, const s32*, u32);
extern const LaneFunction LANE_FUNCTIONS[];

struct Region { u64 base, bytes; Shadow shadow; };

struct Program {
  std::vector<Instr> instructions;
  std::vector<s32> operands;
  std::vector<u8> roles;
  struct Constant { s64 slot, width, value; };
  std::vector<Constant> constants;
  std::vector<std::array<s32, 2>> specials;
  u32 register_bytes = 0, predicates = 0;
  bool wgmma = false;  // any in the program: registers in flight are watched
};

enum class WarpState { READY, AT_BARRIER, YIELDED, WAITS_REGISTERS, DONE };

// Lanes that diverged from the current ones. Parked lanes wait at a .sync instruction for the others of its mask.
struct Group { s32 pc; u32 mask; bool parked; u64 yielded_at; };

// Columns of a warp's quarter of tensor memory that one tcgen05.ld or .st moves: one range, or two that may overlap.
struct TmemColumns { u32 quarter, first, count, second, second_count; };
// One tcgen05.ld whose registers are not known to be complete.
struct TmemLoad { u32 id; TmemColumns columns; };

struct Warp {
  u32 id = 0;
  u8* registers = nullptr;
  u32* predicates = nullptr;
  std::vector<u32> register_init, predicate_init;
  s32 pc = 0;
  u32 mask = 0, live = 0;
  std::vector<Group> others;
  WarpState state = WarpState::READY;
  u64 yielded_at = 0;
  s32 yield_pc = 0;
  u32 yield_address = 0, yield_parity = 0;
  u32 barrier_id = 0;
  View view;
  u32 now = 1;  // own component of the clocks
  u32 met = 1;  // its value when all lanes last met
  u32 touched = 0;  // lanes with accesses to shared or tensor memory since
  u32 registers_per_thread = 0, registers_wanted = 0;
  u32 carry = 0;
  u32 lane_epoch = 1;  // .sync instructions so far, for races between lanes
  // cp.async and bulk groups count per lane, as the ISA says per thread.
  std::array<u32, 32> copy_group{}, bulk_group{};
  struct PendingCopy { u32 address, bytes, group; };
  std::vector<PendingCopy> pending_copies;
  struct PendingBulk { u32 agent, clock, group, lane; s32 pc; };
  std::vector<PendingBulk> pending_bulk;
  std::vector<TmemLoad> loads;    // not waited for
  std::vector<u32> loading;       // by register: TmemLoad::id of the load that fills it, until first use; else 0
  u32 loading_count = 0;          // of them that are not 0
  std::vector<TmemColumns> stores;  // not waited for
  u32 next_load = 0;
  // wgmma: operations issued and known to be complete, those issued at each commit, wgmma.fence executed.
  u32 wgmma_issued = 0, wgmma_done = 0, wgmma_fences = 0;
  std::vector<u32> wgmma_groups;
  // Of one register: the latest wgmma (counted from 1) that accumulates in it, with its N, and that reads A from it;
  // wgmma_fences plus one when anything else last touched it.
  struct WgmmaRegister { u32 accumulating = 0, n = 0, feeding = 0, touched = 0; };
  std::vector<WgmmaRegister> wgmma_registers;
  std::vector<u8> local;
};

struct Mbarrier {
  u32 expected = 0;
  s64 pending = 0, tx = 0;
  u64 phase = 0;
  View arriving, completed;
  u32 init_agent = 0, init_clock = 0;
  s32 init_pc = 0;
  bool fenced = false;  // made visible to the asynchronous proxy
};

struct NamedBarrier {
  u32 arrived = 0, needed = 0, reduced = 0;
  bool whole = false;  // for all threads of the CTA: those that have ended are not waited for
  s32 pc = -1;
  std::vector<u32> waiting;
  View view;
  struct Target { u32 warp; s32 slot; u32 op, mask; };
  std::vector<Target> targets;
};

enum class Work { TENSOR_LOAD, TENSOR_STORE, BULK_LOAD, BULK_STORE, MMA, COMMIT, TMEM_COPY, COPY, COPY_ARRIVE, WGMMA };
struct AsyncOp {
  Work work = Work::COPY;
  explicit AsyncOp(Work kind) : work(kind) {}
  u32 warp = 0, lane = 0, group = 0;
  s32 pc = 0;
  u32 shared = 0, barrier = 0, bytes = 0, bytes_read = 0, reduction = 0, type = 0, rank = 0;
  u64 global = 0;  // address, or tensor map
  s32 coordinates[5] = {0, 0, 0, 0, 0};
  u32 d = 0, a_tmem = 0, descriptor = 0, shape = 0;  // `descriptor` is the instruction descriptor of an MMA
  u64 a = 0, b = 0;
  bool accumulate = false, from_tmem = false, tf32 = false;
  bool gather = false;  // tile::gather4 and tile::scatter4: coordinates are a column and four rows
  View view;  // of the issuing warp, at issue
  u32 agent = 0, clock = 0;
};

// The wgmma operations of four warps that not all of them have issued yet, and the number of those that are done.
struct Warpgroup {
  std::deque<AsyncOp> issuing;
  std::deque<u32> arrived;  // warps, as a mask
  u32 complete = 0, executed = 0;
};

struct TensorMap {
  u64 base, stride[5];
  u32 format, rank, swizzle, element_bytes, dim[5], box[5];
};

// TMEM is tracked by the 32 lanes of a warp's quarter times one column.
struct TmemAccess { u32 agent, issued, completed; s32 pc; };
struct TmemCell {
  bool written = false, was_read = false;
  TmemAccess write{0, 0, 0, 0}, read{0, 0, 0, 0};
  std::vector<TmemAccess> more_reads;  // by other agents
  template <class Visit> void each_read(Visit visit) {
    if (was_read) visit(read);
    for (TmemAccess& other : more_reads) visit(other);
  }
  void note_read(const TmemAccess& access) {
    bool found = false;
    each_read([&](TmemAccess& other) {
      if (other.agent == access.agent) other = access, found = true;
    });
    if (found) return;
    if (was_read) more_reads.push_back(access);
    else read = access, was_read = true;
  }
};

// Who of a warp last touched a word of shared memory, and in which of its epochs; a word that was accessed by halves or
// bytes has a cell for each byte.
struct LaneCell {
  u32 write_epoch = 0, read_epoch = 0, read_lanes = 0;
  s32 write_pc = 0, read_pc = 0;
  u8 write_warp = 0, write_lane = 0, read_warp = 0;
  bool split = false;
};

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
  std::vector<LaneCell> lane_cells_, lane_byte_cells_;  // the second is empty until a word is split
  std::vector<u32> tmem_;
  std::vector<u8> tmem_init_;
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
  void atomic(Warp& w, const Instr& i, const s32* o, u32 m);
  u8* atomic_place(Warp& w, u64 address, u32 bytes, bool shared);

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
  void reduce_global(u8* target, const u8* source, u32 bytes, u32 type, u32 op);
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
  bool select_group(Warp& w);
  bool rendezvous(Warp& w, u32 m, u32 wanted, const char* what);
  bool yield_group(Warp& w);
  void check_registers(Warp& w, const Instr& i, const s32* o, u32 m);
  void select(Warp& w, const Instr& i, const s32* o, u32 m);
  void pack(Warp& w, const Instr& i, const s32* o, u32 m);
  void unpack(Warp& w, const Instr& i, const s32* o, u32 m);
  void shuffle(Warp& w, const Instr& i, const s32* o, u32 m);
  void run_vote(Warp& w, const Instr& i, const s32* o, u32 m);
  void exit_lanes(Warp& w, u32 m);

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
