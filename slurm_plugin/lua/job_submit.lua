-- Classifies jobs, right-sizes and refuses what the site's policy says. Loaded by the site's job_submit.lua, inside
-- slurmctld, which runs one call at a time: no I/O here. Lua 5.1 to 5.4; Slurm 22.05 to 26.05.
--
-- An error in here never stops a job: Slurm 26.05 would reject it, 22.05 would keep half of the changes.

local NO_VAL, NO_VAL16 = 4294967294, 65534                -- what Slurm has in numbers that nobody gave
local RELEASED = 4294967295                               -- the priority that `scontrol release` asks for
local GPU_FIELDS = { "tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task" }
local READ_FIELDS = {
  "tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task", "cpus_per_tres", "partition", "qos"
}
local MAX_FIELD_BYTES = 4096                              -- Slurm's own limits are lower, and come after this hook
local SHARED = "opp"                                      -- the GRES of opportunistic jobs, which the packer gives
local MARK = "hetstream:gpu="                             -- of its Comment; slurm_plugin/install/node_scripts.py
local MARKS = { MARK, "hetstream:holds=", "hetstream:upgrade=" }       -- of the packer's own jobs, too
-- Word of a Comment: its owner holds the job. Slurm alone cannot tell that from the guard's hold; packing/words.py
local HOLD = "hetstream:hold"
-- And one of an operator's hold of a job that was let go, which `uhold` does not let Slurm tell from the packer's.
local OPERATORS_HOLD = "hetstream:operators-hold"
local GUARDED = "hetstream:guarded"                       -- and of its AdminComment: held here, so the packer alone starts it
local TAKING = "hetstream:taking"                         -- of an AdminComment: the packer itself is about to hold the job
local RELEASING = "  "                                    -- ends the Comment of a released job: 22.05 writes no empty one
local PLACE_FIELDS = {
  "account", "comment", "req_nodes", "exc_nodes", "features", "reservation", "tres_per_job", "tres_per_node", "tres_per_socket",
  "tres_per_task"
}

local function given(value)
  return value ~= nil and value ~= "" and value ~= NO_VAL and value ~= NO_VAL16
end

-- How many of a GRES a request names: gres:gpu:2, gres/gpu:h200:2, gres/gpu=2, gpu, with commas between several.
local function num_gres(request, name)
  local total = 0
  for part in (request or ""):gmatch("[^,]+") do
    local rest = part:gsub("^gres[:/]", ""):match("^" .. name .. "(.*)$")
    if rest and (rest == "" or rest:match("^[:=]")) then
      total = total + (tonumber((rest:gsub("%(.*", "")):match("[:=](%d+)$")) or 1)
    end
  end
  return total
end

local function num_gpus(request) return num_gres(request, "gpu") end

local function asks_for(job, name)
  for _, field in ipairs(GPU_FIELDS) do
    if num_gres(job[field], name) > 0 then return true end
  end
  return false
end

-- The job's tasks and GPUs in all; nil where Slurm alone can tell.
local function size(job)
  local nodes = given(job.min_nodes) and job.min_nodes > 0 and job.min_nodes or 1
  local tasks = given(job.num_tasks) and job.num_tasks or nil
  if not tasks then
    local per_node = given(job.ntasks_per_node) and job.ntasks_per_node > 0 and job.ntasks_per_node or 1
    tasks = nodes * per_node
  end
  if num_gpus(job.tres_per_socket) > 0 then return nil end
  local gpus = num_gpus(job.tres_per_job)
  if gpus == 0 then gpus = num_gpus(job.tres_per_node) * nodes end
  if gpus == 0 then gpus = num_gpus(job.tres_per_task) * tasks end
  return tasks, gpus
end

local function partitions(job, part_list)
  if given(job.partition) then return job.partition end
  for name, part in pairs(part_list or {}) do
    if part.flag_default == 1 or part.flag_default == true then return name end
  end
  return ""
end

local function listed(names, list)
  for name in (names or ""):gmatch("[^,]+") do
    for _, known in ipairs(list or {}) do
      if name == known then return name end
    end
  end
end

-- Whether all partitions of a job are opportunistic.
local function all_opportunistic(rule, names)
  for name in names:gmatch("[^,]+") do
    if not listed(name, rule.partitions) then return false end
  end
  return true
end

local function is_manager(rule, uid)
  if uid == 0 then return true end
  for _, manager in ipairs(rule.managers or {}) do
    if uid == manager then return true end
  end
  return false
end

local function has_word(text, word) return (" " .. (text or "") .. " "):find(" " .. word .. " ", 1, true) ~= nil end

local function with_word(comment, word)
  if has_word(comment, word) then return comment end
  local text = (comment or ""):gsub("%s+$", "")
  return text == "" and word or text .. " " .. word
end

local function without_word(comment, word)
  local words = {}
  for found in (comment or ""):gmatch("%S+") do
    if found ~= word then words[#words + 1] = found end
  end
  return table.concat(words, " ")
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

-- The class of a job, and why.
local function class_of(policy, names, qos)
  local rule = policy.opportunistic or {}
  local partition, quality = listed(names, rule.partitions), listed(qos, rule.qos)
  if partition then return "opportunistic", "partition " .. partition end
  if quality then return "opportunistic", "QOS " .. quality end
  return "guaranteed", "no opportunistic partition or QOS"
end

local function refuse(rule, text)
  slurm.log_user("hetstream: " .. text .. " (site rule: " .. rule .. ")")
  return slurm.ERROR
end

local function no_gpus(why)
  return refuse("opportunistic", "an opportunistic job (" .. why .. ") cannot ask for GPUs: the site chooses the one it "
    .. "shares. Remove --gpus and --gres=gpu, or submit to another partition")
end

local function no_whole_nodes(why)
  return refuse("opportunistic", "an opportunistic job (" .. why .. ") cannot have whole nodes, since it would get all of "
    .. "their GPUs. Remove --exclusive")
end

-- CPUs of each task and of each GPU that a request names: --cpus-per-task, --tres-per-task=cpu:N, --cpus-per-gpu.
local function cpus_named(job)
  local task = given(job.cpus_per_task) and job.cpus_per_task or nil
  return task or tonumber((job.tres_per_task or ""):match("cpu[:=](%d+)")),
    tonumber((job.cpus_per_tres or ""):match("gpu[^,]*[:=](%d+)"))
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
  if given(job.tres_per_task) then                        -- since 24.05 --cpus-per-task stands here, too
    job.tres_per_task = (job.tres_per_task:gsub("cpu([=:])%d+", "cpu%1" .. keep))
  end
end

-- Keep the CPUs per GPU that the policy allows.
local function right_size(policy, job, names)
  local rule = policy.cpus_per_gpu
  if not rule then return slurm.SUCCESS end
  local limit, where = limit_of(rule, names)
  local tasks, gpus = size(job)
  if not limit or not tasks or gpus == 0 then return slurm.SUCCESS end
  local task, gpu = cpus_named(job)
  local asked = math.max(tasks * (task or 1), (gpu or 0) * gpus)
  if asked <= limit * gpus then return slurm.SUCCESS end
  local keep, keep_gpu = math.max(1, math.floor(limit * gpus / tasks)), math.max(1, math.floor(limit))
  local option, before, after = "--cpus-per-task", task, keep
  if gpu and gpu * gpus == asked then option, before, after = "--cpus-per-gpu", gpu, keep_gpu end
  local found = string.format("%d CPUs for %d GPU(s) in partition %s, where %d for each GPU are allowed", asked, gpus,
    where, limit)
  local out = "Ask for fewer tasks"
  if before and after < before then
    out = string.format("Write %s=%d, and let data workers load the data: #HETSTREAM --data-workers=0-4", option, after)
  elseif task then
    return slurm.SUCCESS                                  -- one CPU for each task is the least
  end
  -- sbatch hands --cpus-per-gpu to the job's steps in the environment: they would ask for more than the job has.
  if rule.action ~= "shrink" or option == "--cpus-per-gpu" then return refuse("cpus_per_gpu", found .. ". " .. out) end
  -- Tasks are not taken away; and where memory goes by CPU, fewer of them would take it away.
  if not before or given(job.min_mem_per_cpu) then return slurm.SUCCESS end
  shrink_tasks(job, tasks, before, after)
  slurm.log_user(string.format("hetstream: %s: %s=%d became %d (site rule: cpus_per_gpu)", found, option, before,
    after))
  return slurm.SUCCESS
end

-- A text that is too long to be read while the whole cluster waits; nobody who means it writes one.
local function too_long(job)
  for _, field in ipairs(READ_FIELDS) do
    if #(job[field] or "") > MAX_FIELD_BYTES then
      return refuse("length", field .. " has more than " .. MAX_FIELD_BYTES .. " characters")
    end
  end
end

-- What nobody but the packer writes: the GRES of shared GPUs, and the mark by which the Prolog knows which GPU a job shares.
local function packers_own(policy, job, comment)
  if not policy.opportunistic then return end
  if asks_for(job, SHARED) then
    return refuse("opportunistic", "the site gives out GRES " .. SHARED .. ". Remove it from --gres")
  end
  for _, mark in ipairs(MARKS) do
    if (comment or ""):sub(1, #mark) == mark then
      return refuse("opportunistic", "a comment that begins with " .. mark .. " is the site's. Write another one")
    end
  end
end

-- Why nobody can say before a job starts how many GPUs it takes; nil where one can.
local function why_not_counted(job)
  if job.shared == 0 then return "--exclusive takes all GPUs of its nodes. Ask for them: --gpus-per-node" end
  if num_gpus(job.tres_per_socket) > 0 then return "--gpus-per-socket depends on the node. Write --gpus-per-node" end
  if num_gpus(job.tres_per_job) > 0 or not asks_for(job, "gpu") then return end
  local is_range = given(job.max_nodes) and job.max_nodes > 0 and job.max_nodes ~= job.min_nodes
  local is_open = not given(job.max_nodes) and num_gpus(job.tres_per_node) > 0 and given(job.num_tasks)
    and job.num_tasks > 1
  if is_range or is_open then return "it says no single number of nodes. Write --nodes=N, or --gpus=N in all" end
end

local function not_counted(partition, why)
  return refuse("quota", "GPUs of partition " .. partition .. " have quotas, and how many the job takes is not known "
    .. "before: " .. why)
end

-- Where GPUs have quotas, jobs that ask for them wait until the packer has counted.
local function hold_for_quota(policy, job, names, uid)
  local partition = listed(names, (policy.quota or {}).partitions)
  if not partition then return slurm.SUCCESS end
  local manager = is_manager(policy.opportunistic or {}, uid)
  local why = not manager and why_not_counted(job)
  if why then return not_counted(partition, why) end
  if not asks_for(job, "gpu") or manager and job.priority ~= 0 then return slurm.SUCCESS end
  hold(job)
  slurm.log_info("hetstream: held for quota in partition %s", partition)
  return slurm.SUCCESS
end

-- What would get round the quotas: into such a partition later, with more GPUs, or started by its owner.
local function keeps_quota(policy, change, record)
  local rule = policy.quota or {}
  local from, into = listed(record.partition, rule.partitions), listed(change.partition, rule.partitions)
  if into and not from then
    return refuse("quota", "GPUs of partition " .. into .. " have quotas. scancel the job and submit it there")
  end
  if not from then return end
  if change.shared == 0 then return not_counted(from, why_not_counted(change)) end
  if asks_for(change, "gpu") then
    return refuse("quota", "GPUs of partition " .. from .. " have quotas. scancel the job and submit another one")
  end
  if not asks_for(record, "gpu") then return end
  if given(change.priority) and change.priority ~= 0 or given(change.nice) then
    return refuse("quota", "jobs with GPUs in partition " .. from .. " are started by the site: no Priority, no Nice, and "
      .. "no release of what you do not hold")
  end
  for _, field in ipairs({ "account", "min_nodes", "max_nodes", "num_tasks" }) do
    if given(change[field]) and change[field] ~= record[field] then
      return refuse("quota", "jobs with GPUs in partition " .. from .. " keep their " .. field .. ". scancel the job and "
        .. "submit another one")
    end
  end
end

local function submit(policy, job, part_list, uid)
  local refused = too_long(job)
  if refused then return refused end
  local names = partitions(job, part_list)
  local rule = policy.opportunistic or {}
  local own = not is_manager(rule, uid) and packers_own(policy, job, job.comment)
  if own then return own end
  local class, why = class_of(policy, names, job.qos)
  if class == "guaranteed" then
    local rc = right_size(policy, job, names)
    return rc == slurm.SUCCESS and hold_for_quota(policy, job, names, uid) or rc
  end
  if asks_for(job, "gpu") then return no_gpus(why) end
  if job.shared == 0 then return no_whole_nodes(why) end
  if listed(names, rule.partitions) and not all_opportunistic(rule, names) then
    return refuse("opportunistic", "an opportunistic job (" .. why .. ") cannot name other partitions, too. Write "
      .. "--partition with opportunistic ones only")
  end
  -- Slurm requeues batch jobs alone, and a job that gives way must be able to come back.
  if not job.script and not (given(job.het_job_offset) and job.het_job_offset > 0) then
    return refuse("opportunistic", "an opportunistic job (" .. why .. ") is a batch job: Slurm can requeue no other. Use "
      .. "sbatch")
  end
  job.requeue = 1
  if rule.hold then hold(job) end
  slurm.log_info("hetstream: class=opportunistic because of %s%s", why, rule.hold and ": held" or "")
  return slurm.SUCCESS
end

-- Whether the site starts a job, so that its owner's hold and release are a word of its Comment.
local function is_started_by_site(policy, record)
  if class_of(policy, record.partition, record.qos) == "opportunistic" then return policy.opportunistic.hold end
  return listed(record.partition, (policy.quota or {}).partitions) and asks_for(record, "gpu")
end

-- `scontrol hold`, `uhold` and `release` by the owner of a job that the site starts: the word comes or goes, the job stays
-- held. Whether the change was one of these; nothing else takes the word away.
-- One change is handed to all records of an array: a hold keeps its priority, and a release leaves RELEASING for the next.
local function owners_hold(policy, change, record, uid)
  if not is_started_by_site(policy, record) then return false end
  local is_owner, comment = uid == record.user_id, change.comment or ""
  -- (The packer holds the jobs of its own user, too, and means no more than the guard.)
  if is_owner and change.priority == 0 and not is_manager(policy.opportunistic or {}, uid) then
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
local function operators_hold(policy, change, record, uid)
  if uid == record.user_id and not is_manager(policy.opportunistic or {}, uid) then return end
  if not is_started_by_site(policy, record) or has_word(record.admin_comment, TAKING) then return end
  if change.priority == 0 and given(record.priority) and record.priority ~= 0 then
    change.comment = with_word(record.comment, OPERATORS_HOLD)
  elseif (change.priority == 0 or change.priority == RELEASED) and has_word(record.comment, OPERATORS_HOLD) then
    change.comment = without_word(record.comment, OPERATORS_HOLD) .. RELEASING
  end
end

local function modify(policy, change, record, uid)
  local rule = policy.opportunistic or {}
  if is_manager(rule, uid) then
    owners_hold(policy, change, record, uid)
    operators_hold(policy, change, record, uid)
    return slurm.SUCCESS
  end
  local comment = change.comment                          -- as it was asked for
  if owners_hold(policy, change, record, uid) then comment = nil end
  local refused = too_long(change) or packers_own(policy, change, comment) or keeps_quota(policy, change, record)
  if refused then return refused end
  if uid ~= record.user_id then operators_hold(policy, change, record, uid) end
  local class, why = class_of(policy, record.partition, record.qos)
  local becomes, because = class_of(policy, change.partition, change.qos)
  if class == "guaranteed" then
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
  if given(change.qos) and change.qos ~= record.qos then
    return refuse("opportunistic", job .. " keeps its QOS. scancel it and submit with the other one")
  end
  if asks_for(change, "gpu") then return no_gpus(why) end
  if change.shared == 0 then return no_whole_nodes(why) end
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

-- A hook that cannot fail: what `decide` raises is logged, and the job goes on as the site's own rules left it.
local function guarded(site, decide)
  return function(...)
    local rc = slurm.SUCCESS
    if site then rc = site(...) end
    if type(rc) == "number" and rc ~= slurm.SUCCESS then return rc end
    local ok, ours = pcall(decide, ...)
    if ok then return ours == slurm.SUCCESS and rc or ours end
    pcall(slurm.log_info, "hetstream: job accepted as it is, the hook failed: %s", tostring(ours))
    return rc
  end
end

-- Wrap the functions that the site's file has defined. Their refusals stand, and their errors are theirs.
return function(policy)
  if type(policy) ~= "table" then
    slurm.log_info("hetstream: no policy, every job is let through: %s", tostring(policy))
    policy = {}
  end
  slurm_job_submit = guarded(slurm_job_submit, function(job, part_list, uid)
    return submit(policy, job, part_list, uid)
  end)
  slurm_job_modify = guarded(slurm_job_modify, function(job, record, _, uid)
    return modify(policy, job, record, uid)
  end)
end
