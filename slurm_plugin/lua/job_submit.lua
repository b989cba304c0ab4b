-- Classifies jobs, right-sizes and refuses what the site's policy says. Loaded by the site's job_submit.lua, inside
-- slurmctld, which runs one call at a time: no I/O here, and no pattern that takes more than one look at a text.
-- Lua 5.1 to 5.4; Slurm 22.05 to 26.05.
--
-- An error in here never stops a job: Slurm 26.05 would reject it, 22.05 would keep half of the changes. Where the site
-- starts the jobs, such a one waits for it.

local NO_VAL, NO_VAL16 = 4294967294, 65534                -- what Slurm has in numbers that nobody gave
local RELEASED = 4294967295                               -- the priority that `scontrol release` asks for
-- How long Slurm lets a text be (job_mgr.c, _test_strlen). It looks after this hook, while all others wait for it.
local MAX_BYTES = 1024
-- Of these it says no limit, or the site does; only whether they are there is looked at.
local LONGER = { script = math.huge, req_nodes = math.huge, exc_nodes = math.huge }
local READ_EARLY = { "features", "prefer" }                -- by slurmctld itself, before it looks at their lengths (24.11)
local GPU_FIELDS = { "tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task" }
-- GRES that take GPUs, by Slurm's own names: whole ones, and shares of one (gres.c, gres_id_sharing and gres_id_shared).
local GPUS = { gpu = true, shard = true, mps = true }
local FACTOR = { [""] = 1, k = 1024, m = 1024 ^ 2, g = 1024 ^ 3 }
local SHARED = "opp"                                      -- the GRES of opportunistic jobs, which the packer gives
local MARK = "hetstream:gpu="                             -- of its Comment; slurm_plugin/install/units.py
local MARKS = { MARK, "hetstream:holds=", "hetstream:upgrade=" }       -- of the packer's own jobs, too
-- Word of a Comment: its owner holds the job. Slurm alone cannot tell that from the guard's hold; packing/notes.py
local HOLD = "hetstream:hold"
-- And one of an operator's hold of a job that was let go, which `uhold` does not let Slurm tell from the packer's.
local OPERATORS_HOLD = "hetstream:operators-hold"
local GUARDED = "hetstream:guarded"                       -- and of its AdminComment: seen here, so the packer lets it be
local TAKING = "hetstream:taking"                         -- of an AdminComment: the packer itself is about to hold the job
local RELEASING = "  "                                    -- ends the Comment of a released job: 22.05 writes no empty one
local REQUEST_FIELDS = { "tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task", "cpus_per_tres" }
local PLACE_FIELDS = {
  "account", "comment", "req_nodes", "exc_nodes", "features", "reservation", "tres_per_job", "tres_per_node", "tres_per_socket",
  "tres_per_task"
}
-- What decides how many nodes, tasks and CPUs a job has, and with them its GPUs.
local SIZE_FIELDS = {
  "account", "min_nodes", "max_nodes", "num_tasks", "cpus_per_task", "min_cpus", "max_cpus", "pn_min_cpus", "ntasks_per_node",
  "ntasks_per_socket", "ntasks_per_core", "ntasks_per_tres", "sockets_per_node", "cores_per_socket", "threads_per_core",
  "cpus_per_tres", "core_spec", "thread_spec"
}

local function given(value)
  return value ~= nil and value ~= "" and value ~= NO_VAL and value ~= NO_VAL16
end

local function positive(value) return given(value) and value > 0 and value or nil end

-- A request whose texts are no longer than Slurm lets them be: reading another one ends the hook.
local function bounded(job)
  return setmetatable({}, {
    __index = function(_, name)
      local value, limit = job[name], LONGER[name] or MAX_BYTES
      if type(value) == "string" and #value > limit then error({ field = name, limit = limit }, 0) end
      return value
    end,
    __newindex = function(_, name, value) job[name] = value end,
  })
end

local function table_of(value) return type(value) == "table" and value or {} end

-- Name, type and count of one element of a request by Slurm's grammar: gres/gpu:h200:2, gres:gpu:2, gpu=2, cpu=4; and
-- whether it says that it is a GRES. Nothing where it has another form: slurmctld looks for "gres" anywhere in a text, takes what follows, and reads a count as
-- strtoull does, with blanks, signs and units (_is_valid_number).
local function element(part)
  local body = part:match("^gres[:/](.*)$")
  local is_gres = body ~= nil
  body = body or part
  local name, about = body:match("^([%w_.%-]+)(.*)$")
  if not name or body:find("gres", 1, true) then return nil end
  if about == "" then return name, "", 1, is_gres end
  local kind, digits, unit = "", about:match("^[:=](%d+)([kKmMgG]?)$")
  if not digits then kind, digits, unit = about:match("^:([%w_.%-]+)[:=](%d+)([kKmMgG]?)$") end
  if not kind then
    kind = about:match("^:([%w_.%-]+)$")
    -- What Slurm would take for a count: a unit of another kind, or a number below 0, which it turns into one above.
    if not kind or kind:find("^%-") or kind:find("^%d+%a*$") then return nil end
    return name, kind, 1, is_gres
  end
  if #digits > 9 then return nil end
  return name, kind, tonumber(digits) * FACTOR[unit:lower()], is_gres
end

-- GPUs that a request names. Also whether it could name others: its form is not known, or it names one type twice, or GPUs
-- with and without a type. Of these slurmctld takes one, and which depends on the counts and the release. The types, as a
-- text, "" for those without, nil where none is named; and whether it names shares of GPUs.
local function gpus_in(request)
  local counts, unclear, shares = {}, false, false
  for part in (request or ""):gmatch("[^,]+") do
    local name, kind, count = element(part)
    if count and name == "gpu" then
      unclear = unclear or counts[kind] ~= nil
      counts[kind] = count
    elseif count and GPUS[name] then
      shares = shares or count > 0
    elseif not count then
      for word in pairs(GPUS) do unclear = unclear or part:find(word, 1, true) ~= nil end
    end
  end
  local total, types = 0, {}
  for kind, count in pairs(counts) do
    total = total + count
    types[#types + 1] = kind
  end
  table.sort(types)
  return total, unclear or counts[""] ~= nil and #types > 1, types[1] and table.concat(types, ","), shares
end

-- Whether a job could get GPUs: what is not understood could name some.
local function has_gpus(job)
  if positive(job.ntasks_per_tres) then return true end   -- slurmctld makes GPUs of tasks, after this hook
  for _, field in ipairs(GPU_FIELDS) do
    local count, unclear, _, shares = gpus_in(job[field])
    if count > 0 or unclear or shares then return true end
  end
  return false
end

local function asks_for_shared(job)
  for _, field in ipairs(GPU_FIELDS) do
    for part in (job[field] or ""):gmatch("[^,]+") do
      local name, _, count = element(part)
      local is_unclear = not count and part:find("gres", 1, true) and part:find(SHARED, 1, true)
      if count and name == SHARED and count > 0 or is_unclear then return true end
    end
  end
  return false
end

-- Whether a job gets all of a node, and so all of its GPUs: it asks for that, or for cores of the system's. Of --exclusive
-- alone Slurm has `user` and `mcs` that do not (slurm.h, JOB_SHARED_USER and JOB_SHARED_MCS).
local function takes_whole_nodes(job)
  local shared = job.shared
  return given(shared) and shared ~= 1 and shared ~= 2 and shared ~= 3 or given(job.core_spec) or given(job.thread_spec)
end

-- The job's tasks and GPUs in all, as slurmctld will count them, and whether it names GPUs; nil where its request cannot
-- be read. Where GPUs depend on the node, the least that it can get.
local function size(job)
  local nodes = positive(job.min_nodes) or 1
  local tasks = given(job.num_tasks) and job.num_tasks or nodes * (positive(job.ntasks_per_node) or 1)
  local gpus, of_each = 0, positive(job.ntasks_per_tres)
  if of_each and not given(job.num_tasks) then tasks = nodes * of_each end
  local times, named = { 1, nodes, nodes * (positive(job.sockets_per_node) or 1), tasks }, false
  for number, field in ipairs(GPU_FIELDS) do
    local count, unclear, types = gpus_in(job[field])
    if unclear or types and named then return nil end    -- of two fields slurmctld may raise one by the other
    if types then gpus, named = count * times[number], true end
  end
  if not of_each then return tasks, gpus, gpus > 0 end
  if gpus == 0 then return tasks, math.floor(tasks / of_each), false end
  return gpus * of_each, gpus, true
end

local function partitions(job, part_list)
  if given(job.partition) then return job.partition end
  for name, part in pairs(part_list or {}) do
    if part.flag_default == 1 or part.flag_default == true then return name end
  end
  return ""
end

local function entries(list) return type(list) == "string" and { list } or table_of(list) end

local function listed(names, list)
  for name in (names or ""):gmatch("[^,]+") do
    for _, known in ipairs(entries(list)) do
      if name == known then return name end
    end
  end
end

local function all_listed(names, list)
  for name in names:gmatch("[^,]+") do
    if not listed(name, list) then return false end
  end
  return true
end

-- Slurm compares names of QOS without case, and takes quotes out of a list of them (assoc_mgr.c, slurm_addto_char_list).
local function plain_qos(names) return ((names or ""):gsub("[%s\"']", ""):lower()) end

local function qos_of(rule)
  local found = {}
  for number, name in ipairs(entries(rule.qos)) do found[number] = plain_qos(name) end
  return found
end

local function is_manager(policy, uid)
  if uid == 0 then return true end
  for _, manager in ipairs(table_of(table_of(policy.opportunistic).managers)) do
    if uid == manager then return true end
  end
  return false
end

local function words(text)
  local found = {}
  for word in (text or ""):gmatch("%S+") do found[#found + 1] = word end
  return found
end

local function has_word(text, word)
  for _, found in ipairs(words(text)) do
    if found == word then return true end
  end
  return false
end

local function with_word(text, word)
  if has_word(text, word) then return text end
  local kept = (text or ""):reverse():match("^%s*(.*)$"):reverse()      -- a pattern that ends with $ looks again and again
  -- Slurm would refuse a longer one, and say that a path is too long.
  if #kept + 1 + #word > MAX_BYTES then error({ field = "comment", limit = MAX_BYTES - 1 - #word, room = word }, 0) end
  return kept == "" and word or kept .. " " .. word
end

local function without_word(text, word)
  local kept = {}
  for _, found in ipairs(words(text)) do
    if found ~= word then kept[#kept + 1] = found end
  end
  return table.concat(kept, " ")
end

local function has_hold(comment) return has_word(comment, HOLD) end
local function with_hold(comment) return with_word(comment, HOLD) end
local function without_hold(comment) return without_word(comment, HOLD) end

-- Hold a job until the packer releases it; and if its owner held it already, until he does, too.
local function hold(job)
  if job.priority == 0 then job.comment = with_hold(job.comment) end
  job.priority = 0
  job.admin_comment = with_word(job.admin_comment, GUARDED)
end

-- The partitions that a job goes to: one that takes no jobs hands them to its Alternate (job_mgr.c, _alt_part_test). Where
-- it is not said whether it takes some, both count.
local function resolved(names, part_list)
  local found = {}
  for name in (names or ""):gmatch("[^,]+") do
    local seen = {}
    while name and not seen[name] do
      seen[name] = true
      local part = table_of(table_of(part_list)[name])
      local alternate = given(part.alternate) and part.alternate or nil
      local is_open = type(part.state_up) == "number" and part.state_up % 2 == 1       -- slurm.h, PARTITION_SUBMIT
      if is_open or not alternate or part.state_up == nil then found[#found + 1] = name end
      name = not is_open and alternate or nil
    end
  end
  return table.concat(found, ",")
end

-- Why one of these partitions is opportunistic, itself or by the QOS whose limits hold in it; nil if none is. Also whether
-- all are.
local function opportunistic_partition(policy, names, part_list)
  local rule, why, all = table_of(policy.opportunistic), nil, true
  for name in (names or ""):gmatch("[^,]+") do
    local quality = listed(plain_qos(table_of(table_of(part_list)[name]).qos), qos_of(rule))
    if listed(name, rule.partitions) then
      why = why or "partition " .. name
    elseif quality then
      why = why or "QOS " .. quality .. " of partition " .. name
    else
      all = false
    end
  end
  return why, all
end

-- The class of a job, and why.
local function class_of(policy, names, qos, part_list)
  local why = opportunistic_partition(policy, names, part_list)
  local quality = listed(plain_qos(qos), qos_of(table_of(policy.opportunistic)))
  if why then return "opportunistic", why end
  if quality then return "opportunistic", "QOS " .. quality end
  return "guaranteed", "no opportunistic partition or QOS"
end

local function refuse(rule, text)
  local said = "hetstream: " .. text .. " (site rule: " .. rule .. ")"
  slurm.log_user((said:gsub("%%", "%%%%")))               -- Slurm takes it for a format
  return slurm.ERROR
end

local function no_gpus(why)
  return refuse("opportunistic", "an opportunistic job (" .. why .. ") cannot ask for GPUs: the site chooses the one it "
    .. "shares. Remove --gpus and --gres=gpu, or submit to another partition")
end

-- Slurm lets nobody change, hold or release a job of scrontab: where the site starts the jobs, it would wait for ever.
local function no_cron(job, rule)
  if job.cron_job == true or job.cron_job == 1 then
    return refuse(rule, "the site starts these jobs, and Slurm lets nobody start one of scrontab. Submit it with sbatch")
  end
end

local function no_whole_nodes(why)
  return refuse("opportunistic", "an opportunistic job (" .. why .. ") cannot have whole nodes, since it would get all of "
    .. "their GPUs. Remove --exclusive")
end

-- The most of a thing that one element of a request asks for; nil where none does. Also whether one cannot be read.
local function count_of(request, wanted, may_be_gres)
  local found, unclear = nil, false
  for part in (request or ""):gmatch("[^,]+") do
    local name, _, count, is_gres = element(part)
    if not count then                                     -- of a licence no name is that of a thing
      unclear = unclear or part:find(wanted, 1, true) ~= nil and not part:find("^license/[%w_.%-]+[=:]%d+$")
    elseif name == wanted and (may_be_gres or not is_gres) then
      found = math.max(found or 0, count)
    end
  end
  return found, unclear
end

-- CPUs of each task and of each GPU that a request names: --cpus-per-task, --tres-per-task=cpu:N, --cpus-per-gpu. Also
-- whether one of them cannot be read.
local function cpus_named(job)
  local task = given(job.cpus_per_task) and job.cpus_per_task or nil
  local of_task, unclear = count_of(job.tres_per_task, "cpu", false)
  local of_gpu, is_other = count_of(job.cpus_per_tres, "gpu", true)
  if task and of_task then task = math.max(task, of_task) end
  return task or of_task, of_gpu, unclear or is_other
end

-- The most CPUs for each GPU where the job may run, and the partition; nil without a limit.
local function limit_of(rule, names)
  local limit, where
  for name in names:gmatch("[^,]+") do                    -- of several partitions the most generous one holds
    local allowed = rule.max and rule.max[name]
    if not allowed then return nil end
    if not limit or allowed > limit then limit, where = allowed, name end
  end
  return limit, where
end

local function shrink_tasks(job, tasks, asked, keep)
  if given(job.cpus_per_task) then job.cpus_per_task = keep end
  if given(job.min_cpus) then job.min_cpus = tasks * keep end
  if job.pn_min_cpus == asked then job.pn_min_cpus = keep end     -- sbatch asks for a node that holds one task
  if not given(job.tres_per_task) then return end
  local parts = {}                                        -- since 24.05 --cpus-per-task stands here, too
  for part in job.tres_per_task:gmatch("[^,]+") do
    local name, _, _, is_gres = element(part)
    parts[#parts + 1] = name == "cpu" and not is_gres and (part:gsub("%d+[kKmMgG]?$", string.format("%d", keep))) or part
  end
  job.tres_per_task = table.concat(parts, ",")
end

-- Keep the CPUs per GPU that the policy allows.
local function right_size(policy, job, names)
  local rule = policy.cpus_per_gpu
  if not rule then return slurm.SUCCESS end
  local limit, where = limit_of(rule, names)
  if not limit then return slurm.SUCCESS end
  local tasks, gpus = size(job)
  if not tasks then
    return refuse("cpus_per_gpu", "how many GPUs the job asks for cannot be read. Write --gpus=N, or --gpus-per-node=N, "
      .. "in one option")
  end
  if gpus == 0 then return slurm.SUCCESS end
  local task, gpu, unclear = cpus_named(job)
  if unclear then
    return refuse("cpus_per_gpu", "how many CPUs the job asks for cannot be read. Write --cpus-per-task=N, or "
      .. "--cpus-per-gpu=N")
  end
  local named = math.max(tasks * (task or 1), (gpu or 0) * gpus)
  -- Also those that belong to no task: --mincpus, on each node.
  local nodes = positive(job.min_nodes) or 1
  local asked = math.max(named, positive(job.min_cpus) or 0, (positive(job.pn_min_cpus) or 0) * nodes)
  if asked <= limit * gpus then return slurm.SUCCESS end
  local keep, keep_gpu = math.max(1, math.floor(limit * gpus / tasks)), math.max(1, math.floor(limit))
  local option, before, after = "--cpus-per-task", task, keep
  if gpu and gpu * gpus == asked then option, before, after = "--cpus-per-gpu", gpu, keep_gpu end
  local found = string.format("%.0f CPUs for %.0f GPU%s in partition %s, where %s for each GPU are allowed",
    asked, gpus, gpus == 1 and "" or "s", where, limit)
  local out = "Ask for fewer tasks"
  if asked > named then return refuse("cpus_per_gpu", found .. ". Remove --mincpus") end
  if before and after < before then
    out = string.format("Write %s=%d, and let data workers load the data: #HETSTREAM --data-workers=0-4", option, after)
  elseif task and rule.action == "shrink" then
    return slurm.SUCCESS                                  -- one CPU for each task is the least
  end
  -- sbatch hands --cpus-per-gpu to the job's steps in the environment: they would ask for more than the job has.
  if rule.action ~= "shrink" or option == "--cpus-per-gpu" then return refuse("cpus_per_gpu", found .. ". " .. out) end
  -- Tasks are not taken away; and where memory goes by CPU, fewer of them would take it away.
  if not before or given(job.min_mem_per_cpu) then return slurm.SUCCESS end
  shrink_tasks(job, tasks, before, after)
  slurm.log_user(string.format("hetstream: %s: %s=%.0f became %d (site rule: cpus_per_gpu)", found, option, before,
    after))
  return slurm.SUCCESS
end

-- What nobody but the packer writes: the mark by which the Prolog knows which GPU a job shares, in any place of a Comment
-- and whatever the policy says, and the GRES of shared GPUs.
local function packers_own(job, comment)
  for _, mark in ipairs(MARKS) do
    if (comment or ""):find(mark, 1, true) then
      return refuse("opportunistic", "a comment with " .. mark .. " is the site's. Write another one")
    end
  end
  if asks_for_shared(job) then
    return refuse("opportunistic", "the site gives out GRES " .. SHARED .. ". Remove it from --gres")
  end
end

-- Why nobody can say before a job starts how many GPUs it takes; nil where one can.
local function why_not_counted(job)
  if takes_whole_nodes(job) then
    return "--exclusive takes all GPUs of its nodes, and so does --core-spec. Ask for them: --gpus-per-node"
  end
  local named, total = nil, 0
  for _, field in ipairs(GPU_FIELDS) do
    local count, unclear, types, shares = gpus_in(job[field])
    if shares then return "shares of GPUs (shard, mps) are no part of a quota. Write --gpus=N" end
    if unclear then
      return field .. " cannot be read, or names GPUs twice. Write --gpus=N, or --gpus-per-node=N, and each type once"
    end
    if count > 0 and field == "tres_per_socket" then return "--gpus-per-socket depends on the node. Write --gpus-per-node" end
    if types and named then return "two of its options name GPUs. Write one: --gpus=N, or --gpus-per-node=N" end
    if types then named, total = field, count end
  end
  if total == 0 then named = nil end
  local of_each = positive(job.ntasks_per_tres)
  if of_each then
    local tasks, gpus = size(job)
    if not named and not given(job.num_tasks) then return "--ntasks-per-gpu says no number of GPUs. Write --gpus=N" end
    if gpus == 0 or given(job.num_tasks) and job.num_tasks ~= gpus * of_each or tasks ~= gpus * of_each then
      return "--ntasks is not --ntasks-per-gpu for each of its GPUs. Write --gpus=N"
    end
  end
  if not named then return end
  if named == "tres_per_job" then
    -- A job on more nodes than it has GPUs gets more: 22.05 gives it all of each of them, 24.11 does for its cores.
    local tasks = size(job)
    local least = math.max(not of_each and tasks or 1, positive(job.min_nodes) or 1)
    if (positive(job.max_nodes) or least) > total then
      return "its tasks may need more nodes than it has GPUs. Write --nodes=N, with N of its GPUs at most"
    end
    return
  end
  -- Where tasks by node are named, slurmctld makes the tasks of them (node_scheduler.c, build_node_details).
  local is_fixed = positive(job.max_nodes) and job.max_nodes == job.min_nodes
  if named == "tres_per_task" and not positive(job.num_tasks) and not (is_fixed and not given(job.num_tasks)) then
    return "--gpus-per-task says no number of tasks. Write --ntasks=N"
  end
  local by_node = named == "tres_per_task" and positive(job.ntasks_per_node)
  if by_node and given(job.num_tasks) then
    if job.num_tasks % by_node ~= 0 or job.num_tasks < by_node * (positive(job.min_nodes) or 1) then
      return "--ntasks is not --ntasks-per-node on each of its nodes. Write --ntasks=N alone"
    end
  end
  local is_range = positive(job.max_nodes) and not is_fixed
  -- More nodes than one are taken for several tasks, and for more CPUs than one task or its GPUs have.
  local of_one = math.max(positive(job.cpus_per_task) or 1, total * gpus_in(job.cpus_per_tres))
  local spreads = given(job.num_tasks) and job.num_tasks > 1 or given(job.min_cpus) and job.min_cpus > of_one
  local is_open = not positive(job.max_nodes) and named == "tres_per_node" and spreads
  if is_range or is_open then return "it says no single number of nodes. Write --nodes=N" end
end

local function not_counted(partition, why)
  return refuse("quota", "GPUs of partition " .. partition .. " have quotas, and how many the job takes is not known "
    .. "before: " .. why)
end

-- Where GPUs have quotas, jobs that ask for them wait until the packer has counted. What it does not find marked there with
-- GPUs, it holds itself.
local function hold_for_quota(policy, job, names, uid)
  local partition = listed(names, table_of(policy.quota).partitions)
  if not partition then return slurm.SUCCESS end
  if is_manager(policy, uid) and job.priority ~= 0 then
    if has_gpus(job) then job.admin_comment = with_word(job.admin_comment, GUARDED) end
    return slurm.SUCCESS
  end
  local why = not is_manager(policy, uid) and why_not_counted(job)
  if why then return not_counted(partition, why) end
  if not has_gpus(job) then return slurm.SUCCESS end
  -- What slurmctld would make of tasks stands in no record. Since 23.11, which brought this name, it is written gres/gpu.
  local tasks, gpus, named = size(job)
  if tasks and not named then
    job.tres_per_job = string.format(slurm.ESLURM_INVALID_EXTRA and "gres/gpu:%.0f" or "gres:gpu:%.0f", gpus)
  end
  local refused = no_cron(job, "quota")
  if refused then return refused end
  hold(job)
  slurm.log_info("hetstream: held for quota in partition %s", partition)
  return slurm.SUCCESS
end

-- What would get round the quotas: into such a partition later, with more GPUs, or started by its owner.
local function keeps_quota(policy, change, record, part_list)
  local rule = table_of(policy.quota)
  local from = listed(record.partition, rule.partitions)
  local into = given(change.partition) and listed(resolved(change.partition, part_list), rule.partitions)
  if into and not from then
    return refuse("quota", "GPUs of partition " .. into .. " have quotas. scancel the job and submit it there")
  end
  if not from then return end
  if takes_whole_nodes(change) then return not_counted(from, why_not_counted(change)) end
  if has_gpus(change) then
    return refuse("quota", "GPUs of partition " .. from .. " have quotas. scancel the job and submit another one")
  end
  if not has_gpus(record) and not has_word(record.admin_comment, GUARDED) then return end
  if given(change.priority) and change.priority ~= 0 or given(change.nice) then
    return refuse("quota", "jobs with GPUs in partition " .. from .. " are started by the site: no Priority, no Nice, and "
      .. "no release of what you do not hold")
  end
  for _, field in ipairs(REQUEST_FIELDS) do
    if change[field] ~= nil then                          -- whatever it says: "" and 0 take away what was counted
      return refuse("quota", "jobs with GPUs in partition " .. from .. " keep their GPUs. scancel the job and submit another "
        .. "one")
    end
  end
  for _, field in ipairs(SIZE_FIELDS) do
    if given(change[field]) and change[field] ~= record[field] then
      return refuse("quota", "jobs with GPUs in partition " .. from .. " keep their " .. field .. ". scancel the job and "
        .. "submit another one")
    end
  end
  if given(change.req_nodes) then                         -- each of them gets GPUs, also of a job with --gpus=1
    return refuse("quota", "jobs with GPUs in partition " .. from .. " keep their nodes. scancel the job and submit another "
      .. "one")
  end
end

-- What would get a job more CPUs for each GPU than the policy allows, after it was looked at.
local function keeps_cpus(policy, change, record)
  local rule = policy.cpus_per_gpu
  if not rule then return end
  local limit, where = limit_of(rule, given(change.partition) and change.partition or record.partition or "")
  if not limit or not has_gpus(record) and not has_gpus(change) then return end
  local tasks, gpus = size(record)                        -- its tasks are in no record, but its CPUs are
  local asks = has_gpus(change)
  for _, field in ipairs(SIZE_FIELDS) do
    asks = asks or field ~= "account" and given(change[field]) and change[field] ~= record[field]
  end
  local is_more = not tasks or (positive(record.min_cpus) or 0) > limit * gpus
  if asks or given(change.partition) and is_more then
    return refuse("cpus_per_gpu", string.format("jobs with GPUs in partition %s have %s CPUs for each GPU at most. scancel "
      .. "the job and submit another one", where, limit))
  end
end

local function names_partitions(policy)
  for _, rule in ipairs({ table_of(policy.opportunistic).partitions or {}, table_of(policy.quota).partitions or {} }) do
    if #entries(rule) > 0 then return true end
  end
  return next(table_of(table_of(policy.cpus_per_gpu).max)) ~= nil
end

-- An empty name, which Slurm passes over and leaves in the record: who reads that finds another partition.
local function odd_partition(names)
  if given(names) and (names:find("%s") or ("," .. names .. ","):find(",,", 1, true)) then
    return refuse("partition", "--partition has an empty name or a blank. Write the names of partitions, with one comma "
      .. "between two")
  end
end

-- Which partition a job goes to, said where the job does not say it: slurmctld takes that of a reservation, also of one
-- that comes later or stands in a list, as long as it has chosen the partition itself (job_mgr.c, JOB_PART_ASSIGNED).
local function settle_partition(policy, job, names)
  if not names_partitions(policy) then return end
  if given(job.partition) then return odd_partition(job.partition) end
  if given(job.reservation) then
    return refuse("partition", "a reservation may bring a partition of its own. Write --partition beside --reservation")
  end
  if names ~= "" then job.partition = names end
end

-- The QOS of a job that names none: the defaults of its associations, which can be of a partition. Also whether that is
-- all: where there is no default, Slurm takes the only QOS that the association may have, or that of root, which no hook is
-- told (assoc_mgr.c, assoc_mgr_get_default_qos_info; reading assoc_qos of an account that there is not ends slurmctld of
-- 24.11). Without an account there are no associations.
local function default_qos(job, names)
  local asked, found, is_known = job.partition, {}, true
  for name in names:gmatch("[^,]+") do
    job.partition = name
    if given(job.default_qos) then found[#found + 1] = job.default_qos else is_known = false end
  end
  if given(asked) then job.partition = asked end
  return table.concat(found, ","), is_known or not (given(job.account) or given(job.default_account))
end

local function submit(policy, job, part_list, uid)
  local own = not is_manager(policy, uid) and packers_own(job, job.comment)
  if own then return own end
  for _, field in ipairs(READ_EARLY) do given(job[field]) end
  local asked = partitions(job, part_list)
  local names, rule = resolved(asked, part_list), table_of(policy.opportunistic)
  local refused = not is_manager(policy, uid) and settle_partition(policy, job, asked)
  if refused then return refused end
  local qos, is_known = job.qos, true
  if not given(qos) and #qos_of(rule) > 0 then qos, is_known = default_qos(job, names) end
  local class, why = class_of(policy, names, qos, part_list)
  if class == "guaranteed" then
    if not is_known and not is_manager(policy, uid) and (has_gpus(job) or takes_whole_nodes(job)) then
      return refuse("opportunistic", "jobs of some QOS are opportunistic, and which one is the default of your account is not "
        .. "known here. Write --qos=NAME")
    end
    local rc = right_size(policy, job, names)
    return rc == slurm.SUCCESS and hold_for_quota(policy, job, names, uid) or rc
  end
  if has_gpus(job) then return no_gpus(why) end
  if takes_whole_nodes(job) then return no_whole_nodes(why) end
  local by_partition, all = opportunistic_partition(policy, names, part_list)
  if by_partition and not all then
    return refuse("opportunistic", "an opportunistic job (" .. why .. ") cannot name other partitions, too. Write "
      .. "--partition with opportunistic ones only")
  end
  if not by_partition and not all_listed(plain_qos(qos), qos_of(rule)) then
    return refuse("opportunistic", "an opportunistic job (" .. why .. ") cannot have other QOS, too. Write --qos with "
      .. "opportunistic ones only")
  end
  -- Slurm requeues batch jobs alone, and a job that gives way must be able to come back.
  if not job.script and not (given(job.het_job_offset) and job.het_job_offset > 0) then
    return refuse("opportunistic", "an opportunistic job (" .. why .. ") is a batch job: Slurm can requeue no other. Use "
      .. "sbatch")
  end
  job.requeue = 1
  local is_cron = rule.hold and no_cron(job, "opportunistic")
  if is_cron then return is_cron end
  if rule.hold then hold(job) end
  slurm.log_info("hetstream: class=opportunistic because of %s%s", why, rule.hold and ": held" or "")
  return slurm.SUCCESS
end

-- Whether the site starts a job, so that its owner's hold and release are a word of its Comment.
local function is_started_by_site(policy, record, part_list)
  if class_of(policy, record.partition, record.qos, part_list) == "opportunistic" then return policy.opportunistic.hold end
  return listed(record.partition, table_of(policy.quota).partitions)
    and (has_gpus(record) or has_word(record.admin_comment, GUARDED))
end

-- `scontrol hold`, `uhold` and `release` by the owner of a job that the site starts: the word comes or goes, the job stays
-- held. Whether the change was one of these; nothing else takes the word away.
-- One change is handed to all records of an array: a hold keeps its priority, and a release leaves RELEASING for the next.
local function owners_hold(policy, change, record, part_list, uid)
  if not is_started_by_site(policy, record, part_list) then return false end
  local is_owner, comment = uid == record.user_id, change.comment or ""
  -- (The packer holds the jobs of its own user, too, and means no more than the guard.)
  if is_owner and change.priority == 0 and not is_manager(policy, uid) then
    change.comment = with_hold(record.comment)
    return true
  end
  local asks = change.priority == RELEASED and has_hold(record.comment)
  if is_owner and (asks or comment:sub(-#RELEASING) == RELEASING) then
    change.comment, change.priority = without_hold(record.comment) .. RELEASING, NO_VAL
    return true
  end
  if change.comment ~= nil then
    for _, word in ipairs({ HOLD, OPERATORS_HOLD }) do
      if has_word(record.comment, word) then change.comment = with_word(change.comment, word) end
    end
  end
  return false
end

-- A hold by anybody but the owner and the packer. Of a job that was let go it leaves a word; of one that waits held, `uhold`
-- hands that back, and after `hold` Slurm's own reason says whose it is. An operator's release takes it away, too.
local function operators_hold(policy, change, record, part_list, uid)
  if uid == record.user_id and not is_manager(policy, uid) then return end
  if not is_started_by_site(policy, record, part_list) or has_word(record.admin_comment, TAKING) then return end
  if change.priority == 0 and given(record.priority) and record.priority ~= 0 then
    change.comment = with_word(record.comment, OPERATORS_HOLD)
  elseif (change.priority == 0 or change.priority == RELEASED) and has_word(record.comment, OPERATORS_HOLD) then
    change.comment = without_word(record.comment, OPERATORS_HOLD) .. RELEASING
  end
end

local function modify(policy, change, record, part_list, uid)
  local rule = table_of(policy.opportunistic)
  if is_manager(policy, uid) then
    owners_hold(policy, change, record, part_list, uid)
    operators_hold(policy, change, record, part_list, uid)
    return slurm.SUCCESS
  end
  local comment = change.comment                          -- as it was asked for
  if owners_hold(policy, change, record, part_list, uid) then comment = nil end
  local refused = packers_own(change, comment) or names_partitions(policy) and odd_partition(change.partition)
    or keeps_quota(policy, change, record, part_list)
    or keeps_cpus(policy, change, record)
  if refused then return refused end
  if uid ~= record.user_id then operators_hold(policy, change, record, part_list, uid) end
  local class, why = class_of(policy, record.partition, record.qos, part_list)
  local becomes, because = class_of(policy, resolved(change.partition, part_list), change.qos, part_list)
  if class == "guaranteed" then
    if change.qos == "" and #qos_of(rule) > 0 then        -- Slurm takes the default one then
      return refuse("opportunistic", "jobs of some QOS are opportunistic, and which one is the default is not known here. "
        .. "Write QOS=NAME")
    end
    if becomes == "guaranteed" then return slurm.SUCCESS end
    return refuse("opportunistic", "a job does not become an opportunistic one (" .. because .. "). scancel it and submit "
      .. "it there")
  end
  local job = "an opportunistic job (" .. why .. ")"
  if rule.hold and (given(change.priority) and change.priority ~= 0 or given(change.nice)) then    -- Nice sets it, too
    return refuse("opportunistic", job .. " is started by the site: no Priority, no Nice, and no release of what you do "
      .. "not hold. Wait, or scancel it and submit to another partition")
  end
  if given(change.partition) and change.partition ~= record.partition then
    return refuse("opportunistic", job .. " keeps its partition. scancel it and submit to the other one")
  end
  if change.qos ~= nil and plain_qos(change.qos) ~= plain_qos(record.qos) then
    return refuse("opportunistic", job .. " keeps its QOS. scancel it and submit with the other one")
  end
  if has_gpus(change) then return no_gpus(why) end
  if takes_whole_nodes(change) then return no_whole_nodes(why) end
  if change.requeue == 0 then
    return refuse("opportunistic", job .. " can be requeued, or it could not come back after it gave way")
  end
  if (record.comment or ""):sub(1, #MARK) ~= MARK then return slurm.SUCCESS end
  for _, field in ipairs(PLACE_FIELDS) do
    local wanted = change[field]
    if field == "comment" then wanted = comment end
    if wanted ~= nil then                                 -- "" takes away what there is
      return refuse("opportunistic", job .. " has a place, which the site chose: no other " .. field)
    end
  end
  return slurm.SUCCESS
end

-- Whether the site starts jobs in one of these partitions.
local function is_started_there(policy, names, part_list)
  local rule = table_of(policy.opportunistic)
  names = resolved(names, part_list)
  return listed(names, table_of(policy.quota).partitions)
    or rule.hold and opportunistic_partition(policy, names, part_list)
end

-- What becomes of a job that could not be decided on: where the site starts the jobs, it waits for it.
local function submit_undecided(policy, job, part_list, uid)
  if is_manager(policy, uid) or not is_started_there(policy, partitions(job, part_list), part_list) then return end
  hold(job)
end

local function modify_undecided(policy, change, record, part_list, uid)
  local names = given(change.partition) and record.partition .. "," .. change.partition or record.partition
  if is_manager(policy, uid) or not is_started_there(policy, names, part_list) then return end
  return refuse("opportunistic", "the change cannot be looked at: tell your administrator, who finds why in slurmctld's log")
end

local function too_long(text)
  local why = text.room and ": hetstream adds " .. text.room or ""
  return refuse("length", text.field .. " has more than " .. text.limit .. " characters" .. why)
end

-- A hook that cannot fail: what `decide` raises is logged, and `undecided` says what becomes of the job.
local function guarded(site, decide, undecided)
  return function(...)
    local rc = slurm.SUCCESS
    if site then rc = site(...) end
    if type(rc) == "number" and rc ~= slurm.SUCCESS then return rc end
    local ok, ours = pcall(decide, ...)
    if ok then return ours == slurm.SUCCESS and rc or ours end
    if type(ours) == "table" then return too_long(ours) end
    pcall(slurm.log_info, "hetstream: job accepted as it is, the hook failed: %s", tostring(ours))
    local _, answer = pcall(undecided, ...)
    if type(answer) == "table" then return too_long(answer) end
    return answer == slurm.ERROR and answer or rc
  end
end

-- Wrap the functions that the site's file has defined. Their refusals stand, and their errors are theirs.
return function(policy)
  if type(policy) ~= "table" then
    slurm.log_info("hetstream: no policy, every job is let through: %s", tostring(policy))
    policy = {}
  end
  slurm_job_submit = guarded(slurm_job_submit, function(job, part_list, uid)
    return submit(policy, bounded(job), part_list, uid)
  end, function(job, part_list, uid) submit_undecided(policy, job, part_list, uid) end)
  slurm_job_modify = guarded(slurm_job_modify, function(change, record, part_list, uid)
    return modify(policy, bounded(change), record, part_list, uid)
  end, function(change, record, part_list, uid) return modify_undecided(policy, change, record, part_list, uid) end)
end
