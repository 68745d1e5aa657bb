// What the state of a launch is made of: programs, warps, barriers, asynchronous work, cells that checks keep.
#pragma once
#include <array>
#include <deque>
#include <memory>
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
  u32 write_epoch, read_epoch, read_lanes;
  s32 write_pc, read_pc;
  u8 write_warp, write_lane, read_warp;
  bool split;
};
