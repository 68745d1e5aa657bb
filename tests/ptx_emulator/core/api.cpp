// The C interface that bindings.py calls through ctypes.
#include "machine.h"

struct Emulator {
  Program program;
  std::vector<Region> regions;
  Findings findings;
  std::vector<u64> profile;
};

struct FindingRecord {
  s32 pc, agent, other_pc, other_agent, cta, other_cta, space, fatal;
  u64 address, count;
  const char *kind, *text;
};

#pragma GCC visibility push(default)
extern "C" {
Emulator* emulator_new(const Instr* instructions, u64 count, const s32* operands, const u8* roles, u64 operand_count,
                       const s64* constants, u64 constant_count, const s32* specials, u64 special_count,
                       u32 register_bytes, u32 predicates) {
  auto* e = new Emulator;
  e->program.instructions.assign(instructions, instructions + count);
  e->program.operands.assign(operands, operands + operand_count);
  e->program.operands.push_back(0);
  e->program.roles.assign(roles, roles + operand_count);
  e->program.roles.push_back(0);
  for (u64 i = 0; i < constant_count; i++)
    e->program.constants.push_back({constants[3 * i], constants[3 * i + 1], constants[3 * i + 2]});
  for (u64 i = 0; i < special_count; i++) e->program.specials.push_back({specials[2 * i], specials[2 * i + 1]});
  e->program.register_bytes = register_bytes;
  e->program.predicates = predicates;
  for (const Instr& i : e->program.instructions) e->program.wgmma = e->program.wgmma || i.kind == KIND_WGMMA;
  return e;
}
void emulator_free(Emulator* e) { delete e; }
void emulator_clear_regions(Emulator* e) { e->regions.clear(); }
void emulator_add_region(Emulator* e, u64 base, u64 bytes, u32 granule) {
  e->regions.push_back(Region{base, bytes, Shadow(granule)});
}
// Returns 0, or 1 after a fault, which is then the last finding.
s32 emulator_run(Emulator* e, const LaunchConfig* config, LaunchStats* stats) {
  e->findings.clear();
  bool good = run_workers(e->program, *config, e->regions, e->findings, *stats, e->profile);
  return !good;
}
u64 emulator_finding_count(const Emulator* e) { return e->findings.all.size(); }
void emulator_finding(const Emulator* e, u64 index, FindingRecord* out) {
  const Finding& f = e->findings.all[index];
  *out = {f.pc, f.agent, f.other_pc, f.other_agent, f.cta, f.other_cta, f.space, f.fatal, f.address, f.count,
          f.kind.c_str(), f.text.c_str()};
}
void emulator_profile(const Emulator* e, u64* out) { memcpy(out, e->profile.data(), 8 * e->profile.size()); }
}
