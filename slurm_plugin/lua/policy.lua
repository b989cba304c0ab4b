-- What this site wants of hetstream's Lua plugins. Take the "--" away from what shall hold; nothing does by default.
-- sbatch reads it at each call, slurmctld when it loads job_submit.lua: after a change, touch that file.
return {
  -- sbatch (cli_filter.lua). Scripts with #HETSTREAM lines are converted unless this is false.
  -- convert = false,
  -- timeout_s = 10,                    -- for the converter; after that the job is submitted as it is
  -- Directives for scripts that have none, or nil to leave a job alone. `options` are sbatch's.
  -- eligible = function(options)
  --   if options.partition == "gpu" then return "--data-workers=0-4 --data-worker-partition=cpu" end
  -- end,

  -- slurmctld (job_submit.lua). The most CPUs for each GPU, by partition; "refuse" says so, "shrink" takes the rest away.
  -- cpus_per_gpu = { max = { gpu = 4 }, action = "refuse" },
  -- Jobs of these partitions or QOS are opportunistic: they may not ask for GPUs nor change their partition. With `hold`
  -- they wait until root, or a user id in `managers` (that of `hetstream gpu pack`), gives them a place and releases them.
  -- opportunistic = { partitions = { "opp" }, qos = {}, hold = true, managers = {} },
  -- Jobs that ask for GPUs in these partitions wait until `hetstream gpu pack --quotas` has found them within their quota.
  -- Without a packer that runs, nobody starts there: see docs/admin-gpus.md.
  -- quota = { partitions = { "gpu" } },
}
