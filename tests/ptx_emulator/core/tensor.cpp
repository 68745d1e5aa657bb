// tcgen05: tensor memory, its loads and stores, and the issue of what its pipes do.
#include <algorithm>
#include "machine.h"

namespace {
enum { SHAPE_32x32b, SHAPE_16x64b, SHAPE_16x128b, SHAPE_16x256b, SHAPE_16x32bx2 };
}  // namespace

// The agent of everything that one warp (tcgen05) or warpgroup (wgmma, by its first warp) gives to its tensor core.
u32 Cta::pipe(u32 type, u32 warp) {
  for (u32 agent = warps_count; agent < agents_.size(); agent++)
    if (agents_[agent].type == type && agents_[agent].warp == warp) return agent;
  agents_.push_back({type, warp, 0});
  pipes_.emplace_back();
  return (u32)agents_.size() - 1;
}

void Cta::order_pipe(AsyncOp& op) {
  op.agent = pipe(AGENT_TENSOR, op.warp);
  op.clock = ++agents_[op.agent].clock;
  View& view = pipes_[op.agent];
  view.join(op.view);
  view.set_both(op.agent, op.clock);
  if (!checks(CHECK_TCGEN05_FENCES)) return;
  view.tensor_seen.join(op.view.tensor_seen);
  if (op.work != Work::COMMIT) return;
  view.published.join(view.tensor_seen);  // a commit is a fence::before_thread_sync of what it waits for
  view.published.set(op.agent, op.clock);
}

void Cta::fence_tcgen05(Warp& w, bool after) {
  if (!checks(CHECK_TCGEN05_FENCES)) return;
  if (after) {
    w.view.tensor_seen.join(w.view.published);
    return;
  }
  w.view.published.join(w.view.tensor_seen);
  w.view.published.set(w.id, w.now);
  tick(w);
}

void Cta::check_columns(u32 column, u32 count, const char* what, s32 pc, s32 agent) {
  if (column + count > TMEM_COLUMNS)
    fault_at("out-of-bounds", SPACE_TMEM, column, printed("%s of %u columns beyond the 512", what, count));
  if (std::count(column_state_.begin() + column, column_state_.begin() + column + count, (u8)ALLOCATED) == count) return;
  for (u32 c = column; c < column + count; c++) {
    if (column_state_[c] == FREE)
      fault_at("tmem-unallocated", SPACE_TMEM, c, printed("%s of a column that is not allocated", what));
    if (column_state_[c] == RELEASED) {
      report("tmem-use-after-dealloc", pc, agent, column_release_pc_[c], -1, SPACE_TMEM, c,
             printed("%s of a column after its deallocation", what));
      return;
    }
  }
}

void Cta::allocate_tmem(Warp& w, const Instr& i, const s32* o, u32 m) {
  u32 count = reg(w, o[1])[first_lane(m)];
  if (count < 32 || count > 512 || (count & (count - 1)))
    FAULT("tmem-allocation", "%u columns: a power of two from 32 to 512 expected", count);
  if (relinquished_) FAULT("tmem-allocation", "tcgen05.alloc after relinquish_alloc_permit");
  for (u32 base = 0; base + count <= TMEM_COLUMNS; base += count) {
    auto begin = column_state_.begin() + base;
    if (std::find(begin, begin + count, (u8)ALLOCATED) != begin + count) continue;
    tmem_dirty_ = true;
    std::fill(begin, begin + count, (u8)ALLOCATED);
    std::fill_n(column_alloc_pc_.begin() + base, count, w.pc);
    for (u32 row = 0; row < TMEM_LANES; row++) {
      std::fill_n(&tmem_[row * TMEM_COLUMNS + base], count, 0x7fffdeadu);
      std::fill_n(&tmem_init_[row * TMEM_COLUMNS + base], count, (u8)0);
    }
    u32 address = shared_address(w, o[0], first_lane(m), i.imm);
    check_shared(address, 4, "tcgen05.alloc");
    shadow_shared(address, 4, true, actor(w));
    memcpy(&shared_[address], &base, 4);
    memset(&shared_init_[address], 1, 4);
    progress++;
    return;
  }
  // Nothing else on the SM can free columns: one CTA at a time owns all of them here.
  FAULT("deadlock", "tcgen05.alloc of %u columns waits for ever: too few are free", count);
}

void Cta::deallocate_tmem(Warp& w, const s32* o, u32 m) {
  u32 column = reg(w, o[0])[first_lane(m)] & 0xffff, count = reg(w, o[1])[first_lane(m)];
  check_columns(column, count, "tcgen05.dealloc", w.pc, agent_code(AGENT_WARP, w.id));
  for (u32 c = column; c < column + count; c++) {
    // A deallocation takes the columns from whoever still uses them, as a write would.
    for (u32 quarter = 0; quarter < 4; quarter++)
      touch_tmem(quarter, c, 1, true, w.id, w.now, w.now, w.view, w.pc);
    column_state_[c] = RELEASED;
    column_release_pc_[c] = w.pc;
  }
  progress++;
}

void Cta::check_tmem_order(u64 place, const TmemAccess& earlier, const char* what, const char* wait, u32 agent,
                           const View& view, s32 pc) {
  if (!view.seen.covers(earlier.agent, earlier.issued))
    report("tmem-race", pc, name_agent(agent), earlier.pc, name_agent(earlier.agent), SPACE_TMEM, place, what);
  else if (!view.seen.covers(earlier.agent, earlier.completed))
    report("missing-tcgen05-wait", pc, name_agent(agent), earlier.pc, name_agent(earlier.agent), SPACE_TMEM, place,
           printed("%s; ordered only by use of the data, no %s before the signal", what, wait));
  else if (checks(CHECK_TCGEN05_FENCES) && !view.tensor_seen.covers(earlier.agent, earlier.completed))
    report("missing-tcgen05-fence", pc, name_agent(agent), earlier.pc, name_agent(earlier.agent), SPACE_TMEM, place,
           printed("%s by tcgen05.fence::before_thread_sync and ::after_thread_sync", what));
}

// One access of a quarter's columns.
void Cta::touch_tmem(u32 quarter, u32 column, u32 count, bool write, u32 agent, u32 clock, u32 completed,
                     const View& view, s32 pc) {
  if (!checks(CHECK_RACES)) return;
  const TmemAccess access{agent, clock, completed, pc};
  const char* after_write = write ? "write, not ordered after the other write" : "read, not ordered after the write";
  for (u32 c = column; c < column + count; c++) {
    TmemCell& cell = tmem_cells_[quarter * TMEM_COLUMNS + c];
    const u64 place = (u64)quarter * 32 << 16 | c;
    if (cell.written && cell.write.agent != agent)
      check_tmem_order(place, cell.write, after_write, "tcgen05.wait::st", agent, view, pc);
    if (!write) {
      cell.note_read(access);
      continue;
    }
    cell.each_read([&](const TmemAccess& read) {
      if (read.agent != agent)
        check_tmem_order(place, read, "write, not ordered after the read", "tcgen05.wait::ld", agent, view, pc);
    });
    cell.was_read = false, cell.more_reads.clear();
    cell.written = true, cell.write = access;
  }
}

void Cta::move_tmem(Warp& w, const Instr& i, const s32* o, u32 m) {
  const bool load = i.kind == KIND_T5_LD;
  u32 address = uniform(w, o[0], m, "TMEM address") + (u32)i.imm;
  u32 lane0 = address >> 16, column = address & 0xffff, quarter = w.id % 4;
  bool half = i.a != SHAPE_32x32b;
  if (lane0 != 32 * quarter && !(half && lane0 == 32 * quarter + 16))
    FAULT("tmem-lanes", "warp %u may access lanes %u to %u, not %u", w.id, 32 * quarter, 32 * quarter + 31, lane0);
  const bool halves = i.a == SHAPE_16x32bx2;  // two parts of 16 lanes, i.c columns apart
  const u32 per_unit = i.a == SHAPE_16x128b ? 2 : i.a == SHAPE_16x256b ? 4 : 1;
  const u32 columns = (u32)i.b * (half && !halves ? per_unit * 2 : 1), registers = (u32)i.b * per_unit;
  w.touched = ~0u;
  const char* what = load ? "tcgen05.ld" : "tcgen05.st";
  TmemColumns touched{quarter, column, columns, column, 0};
  check_columns(column, columns, what, w.pc, agent_code(AGENT_WARP, w.id));
  if (halves) {
    touched.second = column + (u32)i.c, touched.second_count = columns;
    check_columns(touched.second, columns, what, w.pc, agent_code(AGENT_WARP, w.id));
  }
  if (checks(CHECK_RACES)) note_tmem_move(w, touched, load, o + 1, registers);
  if (i.a == SHAPE_32x32b) {
    for (u32 t = 0; t < 32; t++) move_tmem_row(w, load, (lane0 + t) * TMEM_COLUMNS + column, t, o + 1, registers);
    progress++;
    return;
  }
  // Register k of thread t: the fragments of the ISA's figures, two rows eight apart for the 16-lane shapes.
  auto cell = [&](u32 k, u32 t) {
    if (halves) return (lane0 + t % 16) * TMEM_COLUMNS + column + k + t / 16 * (u32)i.c;
    // As the layout of CuTe DSL's Ld16x64b atom has it: eight rows from bit 0 of the thread, a column from bit 1.
    if (i.a == SHAPE_16x64b) return (lane0 + t / 4 + (t & 1) * 8) * TMEM_COLUMNS + column + 2 * k + (t >> 1 & 1);
    if (i.a == SHAPE_16x128b)
      return (lane0 + (k & 1) * 8 + t / 4) * TMEM_COLUMNS + column + k / 2 * 4 + t % 4;
    return (lane0 + (k >> 1 & 1) * 8 + t / 4) * TMEM_COLUMNS + column + k / 4 * 8 + t % 4 * 2 + (k & 1);
  };
  for (u32 k = 0; k < registers; k++)
    for (u32 t = 0; t < 32; t++) move_tmem_row(w, load, cell(k, t), t, o + 1 + k, 1);
  progress++;
}

// Consecutive columns of one lane, from or to one register each of one thread.
void Cta::move_tmem_row(Warp& w, bool load, u32 at, u32 thread, const s32* registers, u32 count) {
  u32* cells = &tmem_[at];
  u8* init = &tmem_init_[at];
  if (!load) {
    for (u32 k = 0; k < count; k++)
      if (registers[k] >= 0) cells[k] = reg(w, registers[k])[thread], init[k] = 1;
    return;
  }
  const bool complete = !checks(CHECK_INIT) || !memchr(init, 0, count);
  for (u32 k = 0; k < count; k++) {
    if (registers[k] < 0) continue;
    if (!complete && !init[k])
      report("uninitialised-tmem", w.pc, agent_code(AGENT_WARP, w.id), -1, -1, SPACE_TMEM,
             (u64)((at + k) / TMEM_COLUMNS) << 16 | (at + k) % TMEM_COLUMNS,
             "load of tensor memory that nothing has written");
    reg(w, registers[k])[thread] = cells[k];
  }
}

void Cta::note_tmem_move(Warp& w, const TmemColumns& columns, bool load, const s32* registers, u32 count) {
  touch_tmem(columns.quarter, columns.first, columns.count, !load, w.id, load ? PENDING : w.now, PENDING, w.view, w.pc);
  touch_tmem(columns.quarter, columns.second, columns.second_count, !load, w.id, load ? PENDING : w.now, PENDING, w.view,
             w.pc);
  if (!load) {
    w.stores.push_back(columns);
    return;
  }
  const u32 id = ++w.next_load;
  for (u32 k = 0; k < count; k++) {
    if (registers[k] < 0) continue;
    u32& loading = w.loading[(u32)registers[k] >> 7];
    w.loading_count += !loading;
    loading = id;
  }
  w.loads.push_back({id, columns});
}

template <class Visit> void Cta::each_tmem_cell(const TmemColumns& columns, Visit visit) {
  TmemCell* cells = &tmem_cells_[columns.quarter * TMEM_COLUMNS];
  for (u32 c = columns.first; c < columns.first + columns.count; c++) visit(cells[c]);
  for (u32 c = columns.second; c < columns.second + columns.second_count; c++) visit(cells[c]);
}

// A load is complete when one of its registers is used (the hardware must have delivered it) or waited for; only the
// wait counts for the letter of the ISA, so the two times are kept apart.
void Cta::complete_load(Warp& w, u32 id, bool waited) {
  for (const TmemLoad& load : w.loads) {
    if (load.id != id) continue;
    each_tmem_cell(load.columns, [&](TmemCell& cell) {
      cell.each_read([&](TmemAccess& read) {
        if (read.agent != w.id) return;
        if (read.issued == PENDING) read.issued = w.now;
        if (waited && read.completed == PENDING) read.completed = w.now;
      });
    });
  }
}

void Cta::use_loading_registers(Warp& w, const Instr& i, const s32* o) {
  const u8* roles = &launch.program.roles[(size_t)i.at];
  for (s32 k = 0; k < i.count; k++) {
    if (roles[k] != ROLE_USE) continue;
    const u32 id = w.loading[(u32)o[k] >> 7];
    if (!id) continue;
    complete_load(w, id, false);
    for (u32& loading : w.loading)
      if (loading == id) loading = 0, w.loading_count--;
    if (!w.loading_count) return;
  }
}

void Cta::wait_tmem(Warp& w, bool stores) {
  if (!checks(CHECK_RACES)) return;
  if (!stores) {
    for (const TmemLoad& load : w.loads) complete_load(w, load.id, true);
    w.loads.clear();
    if (w.loading_count) std::fill(w.loading.begin(), w.loading.end(), 0);
    w.loading_count = 0;
    return;
  }
  for (const TmemColumns& store : w.stores)
    each_tmem_cell(store, [&](TmemCell& cell) {
      if (cell.written && cell.write.agent == w.id && cell.write.completed == PENDING) cell.write.completed = w.now;
    });
  w.stores.clear();
}

void Cta::issue_mma(Warp& w, const Instr& i, const s32* o, u32 m) {
  EACH_LANE(m) {
    AsyncOp op{i.kind == KIND_T5_MMA ? Work::MMA : i.kind == KIND_T5_CP ? Work::TMEM_COPY : Work::COMMIT};
    op.warp = w.id, op.lane = lane, op.pc = w.pc;
    if (i.kind == KIND_T5_COMMIT) {
      op.barrier = shared_address(w, o[0], lane, i.imm);
    } else {
      op.d = (u32)lane_address(w, o[0], lane, i.imm);
      if (i.kind == KIND_T5_CP) {
        op.a = reg64(w, o[1])[lane];
        op.shape = (u32)i.a;
      } else {
        op.from_tmem = i.a;
        op.tf32 = i.c;
        if (op.from_tmem) op.a_tmem = (u32)lane_address(w, o[1], lane, i.b);
        else op.a = reg64(w, o[1])[lane];
        op.b = reg64(w, o[2])[lane];
        op.descriptor = reg(w, o[3])[lane];
        op.accumulate = o[4] == ALWAYS_TRUE || (o[4] >= 0 && (w.predicates[o[4]] >> lane & 1));
        for (s32 k = 5; k < i.count; k++)
          if (reg(w, o[k])[lane]) FAULT("not-modelled", "tcgen05.mma with lanes disabled");
      }
    }
    if (checks(CHECK_RACES)) op.view = released(w, m);
    if (checks(CHECK_TCGEN05_FENCES)) op.view.tensor_seen.set(w.id, w.now);  // what the thread itself did and waited for
    issue(std::move(op));
  }
  tick(w);
}
