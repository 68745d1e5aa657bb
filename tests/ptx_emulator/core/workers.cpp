// A launch spread over threads: every worker interprets its own CTAs on the same tensors, with its own shadow memory,
// findings and counts, which are put together at the end.
#include <algorithm>
#include <thread>
#include "machine.h"

namespace {
struct Worker {
  std::vector<Region> regions;
  Findings findings;
  std::unique_ptr<Launch> launch;
  std::unique_ptr<Finding> fault;

  void run() {
    try {
      launch->run();
    } catch (const Fault& error) {
      Cta* cta = launch->current;
      s32 warp = cta ? cta->current_warp : -1;
      s32 pc = warp >= 0 ? cta->warps[(size_t)warp].pc : -1;
      s32 agent = warp >= 0 ? agent_code(AGENT_WARP, (u32)warp) : -1;
      fault.reset(new Finding{error.kind, error.what(), pc, agent, -1, -1, cta ? (s32)cta->index : -1, -1, error.space,
                              error.address, 1, true});
      if (launch->together) launch->together->stopped = true;
    }
  }
};

// CTAs of different workers are never ordered: what both touched, one of them by a write, is a conflict.
void compare_workers(const Worker& a, const Worker& b, Findings& findings, u32 warps) {
  auto name = [&](u32 agent) { return agent < warps ? agent_code(AGENT_WARP, agent) : -1; };
  for (size_t i = 0; i < a.regions.size(); i++) {
    const Region &mine = a.regions[i], &theirs = b.regions[i];
    if (mine.shadow.empty() || theirs.shadow.empty()) continue;
    mine.shadow.compare(theirs.shadow, mine.bytes,
                        [&](Conflict kind, u64 granule, const Shadow::Seen& here, const Shadow::Seen& earlier) {
      const char* text = kind == Conflict::READ_AFTER_WRITE   ? "read, not ordered after the write"
                         : kind == Conflict::WRITE_AFTER_READ ? "write, not ordered after the read"
                                                              : "write, not ordered after the other write";
      findings.add({"global-conflict", text, here.pc, name(here.agent), earlier.pc, -1, (s32)here.cta, (s32)earlier.cta,
                    SPACE_GLOBAL, mine.base + granule * mine.shadow.granule(), 1, false});
    });
  }
}
}  // namespace

bool run_workers(const Program& program, const LaunchConfig& config, std::vector<Region>& regions, Findings& findings,
                 LaunchStats& stats, std::vector<u64>& profile) {
  const u32 ctas = config.grid[0] * config.grid[1] * config.grid[2];
  const u32 count = std::max(1u, std::min(config.workers, ctas));
  Together together;
  std::vector<Worker> workers(count);
  for (u32 k = 0; k < count; k++) {
    for (const Region& region : regions)
      workers[k].regions.push_back(Region{region.base, region.bytes, Shadow(region.shadow.granule())});
    workers[k].launch = std::make_unique<Launch>(program, config, workers[k].regions, workers[k].findings, k, count,
                                                 count > 1 ? &together : nullptr);
  }
  std::vector<std::thread> threads;
  for (u32 k = 1; k < count; k++) threads.emplace_back([&workers, k] { workers[k].run(); });
  workers[0].run();
  for (std::thread& thread : threads) thread.join();
  stats = LaunchStats{};
  profile.assign(program.instructions.size(), 0);
  for (Worker& worker : workers) {
    const LaunchStats& part = worker.launch->stats;
    stats.instructions += part.instructions, stats.mma += part.mma, stats.async_ops += part.async_ops;
    stats.async_bytes += part.async_bytes, stats.ctas += part.ctas;
    for (size_t pc = 0; pc < profile.size(); pc++) profile[pc] += worker.launch->profile[pc];
    for (Finding& finding : worker.findings.all) findings.add(std::move(finding));
  }
  const u32 warps = (config.block[0] * config.block[1] * config.block[2] + 31) / 32;
  for (u32 k = 0; k < count; k++)
    for (u32 other = k + 1; other < count; other++) compare_workers(workers[k], workers[other], findings, warps);
  auto failed = std::find_if(workers.begin(), workers.end(), [](const Worker& worker) { return worker.fault != nullptr; });
  if (failed == workers.end()) return true;
  findings.all.push_back(*failed->fault);
  return false;
}
