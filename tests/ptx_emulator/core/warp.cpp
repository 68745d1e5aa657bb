// The interpreter: one warp, 32 lanes at a time.
#include "machine.h"

void Cta::check_registers(Warp& w, const Instr& i, const s32* o, u32 m) {
  const u8* roles = &launch.program.roles[(size_t)i.at];
  auto report_use = [&](const char* what, u32 lanes) {
    report("uninitialised-register", w.pc, agent_code(AGENT_WARP, w.id), -1, -1, SPACE_NONE, 0,
           printed("%s in lanes %08x that nothing has written", what, lanes));
  };
  if (i.guard >= 0 && (w.mask & ~w.predicate_init[i.guard])) report_use("guard", w.mask & ~w.predicate_init[i.guard]);
  for (s32 k = 0; k < i.count; k++) {
    if (roles[k] == ROLE_USE && (m & ~w.register_init[(u32)o[k] >> 7]))
      report_use("operand", m & ~w.register_init[(u32)o[k] >> 7]);
    else if (roles[k] == ROLE_USE_PREDICATE && (m & ~w.predicate_init[o[k]]))
      report_use("predicate", m & ~w.predicate_init[o[k]]);
  }
  for (s32 k = 0; k < i.count; k++) {
    if (roles[k] == ROLE_DEFINE) w.register_init[(u32)o[k] >> 7] |= m;
    else if (roles[k] == ROLE_DEFINE_PREDICATE) w.predicate_init[o[k]] |= m;
  }
}

void Cta::run(Warp& w, u64 budget) {
  const Instr* instructions = launch.program.instructions.data();
  const s32* operands = launch.program.operands.data();
  u8* R = w.registers;
  u32* P = w.predicates;
  const bool check_init = checks(CHECK_INIT), watch_wgmma = launch.program.wgmma && checks(CHECK_RACES);
  for (u64 n = 0; n < budget; n++) {
    if (!w.others.empty() && !select_group(w)) {
      // All groups wait: at the slowest one's place, for whatever makes progress.
      w.state = WarpState::YIELDED;
      w.yielded_at = progress;
      w.yield_pc = w.others[0].pc;
      return;
    }
    const Instr& i = instructions[w.pc];
    const s32* o = operands + i.at;
    u32 m = w.mask;
    launch.stats.instructions++;
    launch.profile[(size_t)w.pc]++;
    if (i.guard >= 0) {
      u32 condition = i.negated ? ~P[i.guard] : P[i.guard];
      if (i.kind == KIND_BRA) {
        if (check_init && (m & ~w.predicate_init[i.guard])) check_registers(w, i, o, m);
        u32 taken = m & condition;
        if (taken == m) { w.pc = (s32)i.imm; continue; }
        w.pc++;
        if (taken) {
          w.others.push_back({(s32)i.imm, taken, false, 0});
          w.mask = m & ~taken;
        }
        continue;
      }
      m &= condition;
      if (!m) { w.pc++; continue; }
    }
    if (check_init) check_registers(w, i, o, m);
    if (watch_wgmma) check_wgmma_registers(w, i, o);
    if (w.loading_count) use_loading_registers(w, i, o);
    if (i.kind >= FIRST_LANE_KIND) {
      LANE_FUNCTIONS[i.kind - FIRST_LANE_KIND](R, P, o, m);
      w.pc++;
      continue;
    }
    switch (i.kind) {
      case KIND_BRA: w.pc = (s32)i.imm; continue;
      case KIND_NOP: case KIND_MEMBAR: case KIND_T5_RELINQUISH: if (i.kind == KIND_T5_RELINQUISH) relinquished_ = true; break;
      case KIND_PRED_MOV: { u32 v = o[1] >= 0 ? P[o[1]] : i.imm ? ~0u : 0; P[o[0]] = (P[o[0]] & ~m) | (v & m); break; }
      case KIND_PRED_AND: P[o[0]] = (P[o[0]] & ~m) | (P[o[1]] & P[o[2]] & m); break;
      case KIND_PRED_OR: P[o[0]] = (P[o[0]] & ~m) | ((P[o[1]] | P[o[2]]) & m); break;
      case KIND_PRED_XOR: P[o[0]] = (P[o[0]] & ~m) | ((P[o[1]] ^ P[o[2]]) & m); break;
      case KIND_PRED_NOT: P[o[0]] = (P[o[0]] & ~m) | (~P[o[1]] & m); break;
      case KIND_SELP: select(w, i, o, m); break;
      case KIND_PACK: pack(w, i, o, m); break;
      case KIND_UNPACK: unpack(w, i, o, m); break;
      case KIND_LD: load(w, i, o, m); break;
      case KIND_ST: store(w, i, o, m); break;
      default:
        if (run_other(w, i, o, m) == Outcome::STOP) return;
        continue;
    }
    w.pc++;
  }
}

// Instructions in which lanes of a warp meet. Those of a part of the warp count for all of it.
static bool lanes_meet(s32 kind) {
  switch (kind) {
    case KIND_SHFL: case KIND_VOTE: case KIND_MATCH: case KIND_REDUX: case KIND_ELECT: case KIND_SYNCWARP: case KIND_BAR:
    case KIND_MB_WAIT: case KIND_T5_ALLOC: case KIND_T5_DEALLOC: case KIND_T5_LD: case KIND_T5_ST: case KIND_T5_WAIT:
    case KIND_SETMAXNREG: case KIND_LDMATRIX: case KIND_STMATRIX: case KIND_MOVMATRIX: case KIND_MMA_SYNC:
    case KIND_WGMMA: case KIND_WGMMA_FENCE: case KIND_WGMMA_COMMIT: case KIND_WGMMA_WAIT:
      return true;
  }
  return false;
}

// Everything that may block, end or move the warp. It advances the pc itself.
Cta::Outcome Cta::run_other(Warp& w, const Instr& i, const s32* o, u32 m) {
  if (checks(CHECK_LANES) && lanes_meet(i.kind)) w.lane_epoch++;
  switch (i.kind) {
    case KIND_RET:
      exit_lanes(w, m);
      if (!w.mask) {
        if (w.others.empty()) {
          w.state = WarpState::DONE;
          leave_barriers();
          return Outcome::STOP;
        }
        // Parked groups may have been waiting for the lanes that left.
        for (Group& group : w.others) group.parked = false;
        return Outcome::CONTINUE;
      }
      break;
    case KIND_TRAP: FAULT("trap", "trap instruction");
    case KIND_YIELD: break;
    case KIND_SHFL:
      if (!rendezvous(w, m, reg(w, o[5])[first_lane(m)], "shfl.sync")) return Outcome::CONTINUE;
      shuffle(w, i, o, m);
      break;
    case KIND_VOTE:
      if (!rendezvous(w, m, reg(w, o[2])[first_lane(m)], "vote.sync")) return Outcome::CONTINUE;
      run_vote(w, i, o, m);
      break;
    case KIND_MATCH:
      if (!rendezvous(w, m, reg(w, o[2])[first_lane(m)], "match.sync")) return Outcome::CONTINUE;
      match(w, i, o, m);
      break;
    case KIND_REDUX:
      if (!rendezvous(w, m, reg(w, o[2])[first_lane(m)], "redux.sync")) return Outcome::CONTINUE;
      reduce_lanes(w, i, o, m);
      break;
    case KIND_ACTIVEMASK: EACH_LANE(m) reg(w, o[0])[lane] = m; break;
    case KIND_ELECT: {
      if (!rendezvous(w, m, reg(w, o[2])[first_lane(m)], "elect.sync")) return Outcome::CONTINUE;
      u32 leader = first_lane(m);
      if (o[0] >= 0) EACH_LANE(m) reg(w, o[0])[lane] = leader;
      if (o[1] >= 0) w.predicates[o[1]] = (w.predicates[o[1]] & ~m) | 1u << leader;
      break;
    }
    case KIND_SYNCWARP:
      if (!rendezvous(w, m, reg(w, o[0])[first_lane(m)], "bar.warp.sync")) return Outcome::CONTINUE;
      meet(w);
      break;
    case KIND_BAR:
      if (!rendezvous(w, m, ~0u, "bar")) return Outcome::CONTINUE;
      return run_named(w, i, o, m) ? Outcome::CONTINUE : Outcome::STOP;
    case KIND_T5_FENCE: fence_tcgen05(w, i.a); break;
    case KIND_FENCE_PROXY: case KIND_FENCE_MBAR_INIT: fence(w, i); break;
    case KIND_MB_INIT: case KIND_MB_INVAL: case KIND_MB_ARRIVE: case KIND_MB_ARRIVE_TX: case KIND_MB_EXPECT_TX:
      run_mbarrier(w, i, o, m);
      break;
    case KIND_MB_WAIT: {
      bool all = wait_mbarrier(w, i, o, m);
      w.pc++;
      if (all) return Outcome::CONTINUE;
      if (yield_group(w)) return Outcome::CONTINUE;
      w.state = WarpState::YIELDED;
      w.yielded_at = progress;
      w.yield_pc = w.pc - 1;
      return Outcome::STOP;
    }
    case KIND_CP_ASYNC: issue_copy(w, i, o, m); break;
    case KIND_CP_ARRIVE: issue_copy_arrive(w, i, o, m); break;
    case KIND_CP_COMMIT: EACH_LANE(m) w.copy_group[lane]++; break;
    case KIND_CP_WAIT: wait_copies(w, i, m); break;
    case KIND_TMA_LOAD: case KIND_TMA_STORE: case KIND_BULK_LOAD: case KIND_BULK_STORE: issue_bulk(w, i, o, m); break;
    case KIND_BULK_COMMIT: EACH_LANE(m) w.bulk_group[lane]++; break;
    case KIND_BULK_WAIT: wait_bulk(w, i, m); break;
    case KIND_T5_ALLOC:
      if (!rendezvous(w, m, ~0u, "tcgen05.alloc")) return Outcome::CONTINUE;
      allocate_tmem(w, i, o, m);
      break;
    case KIND_T5_DEALLOC:
      if (!rendezvous(w, m, ~0u, "tcgen05.dealloc")) return Outcome::CONTINUE;
      deallocate_tmem(w, o, m);
      break;
    case KIND_T5_LD: case KIND_T5_ST:
      if (!rendezvous(w, m, ~0u, "tcgen05.ld/st")) return Outcome::CONTINUE;
      move_tmem(w, i, o, m);
      break;
    case KIND_T5_WAIT:
      if (!rendezvous(w, m, ~0u, "tcgen05.wait")) return Outcome::CONTINUE;
      wait_tmem(w, i.a);
      break;
    case KIND_T5_MMA: case KIND_T5_COMMIT: case KIND_T5_CP: issue_mma(w, i, o, m); break;
    case KIND_SETMAXNREG:
      if (!rendezvous(w, m, ~0u, "setmaxnreg")) return Outcome::CONTINUE;
      if (!set_registers(w, i)) return Outcome::STOP;
      break;
    case KIND_ATOM: atomic(w, i, o, m); break;
    case KIND_MAPA:
      EACH_LANE(m) {
        if (reg(w, o[2])[lane]) FAULT("not-modelled", "mapa of CTA rank %u: clusters of one CTA only", reg(w, o[2])[lane]);
        if (i.a == 8) reg64(w, o[0])[lane] = reg64(w, o[1])[lane];
        else reg(w, o[0])[lane] = reg(w, o[1])[lane];
      }
      break;
    case KIND_LDMATRIX: case KIND_STMATRIX: case KIND_MOVMATRIX: case KIND_MMA_SYNC: case KIND_WGMMA:
      if (!rendezvous(w, m, ~0u, "matrix instruction")) return Outcome::CONTINUE;
      if (i.kind == KIND_LDMATRIX) load_matrix(w, i, o, m);
      else if (i.kind == KIND_STMATRIX) store_matrix(w, i, o, m);
      else if (i.kind == KIND_MOVMATRIX) move_matrix(w, o, m);
      else if (i.kind == KIND_MMA_SYNC) multiply_warp(w, i, o, m);
      else issue_wgmma(w, i, o);
      break;
    case KIND_WGMMA_FENCE: case KIND_WGMMA_COMMIT: case KIND_WGMMA_WAIT:
      if (!rendezvous(w, m, ~0u, "wgmma")) return Outcome::CONTINUE;
      if (i.kind == KIND_WGMMA_FENCE) w.wgmma_fences++;
      else if (i.kind == KIND_WGMMA_COMMIT) w.wgmma_groups.push_back(w.wgmma_issued);
      else if (!wait_wgmma(w, i)) return Outcome::STOP;
      break;
    default: FAULT("not-modelled", "operation %d", i.kind);
  }
  w.pc++;
  return Outcome::CONTINUE;
}
