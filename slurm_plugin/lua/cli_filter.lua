-- Hands an eligible sbatch to `hetstream internal filter`, and submits what that plans. Loaded by the site's cli_filter.lua,
-- inside the user's own sbatch; Lua 5.1 to 5.4.
--
-- Two phases, so that nothing is submitted twice. The converter only plans: whatever goes wrong there leaves the plain
-- submission to go on, with one note on stderr. Once there is a plan, sbatch is run with it and its answer is final.

local MARK, DONE = "#HETSTREAM", "# >>> hetstream >>>"    -- hetjob/convert/directives.py, hetjob/convert/render.py
local NOTHING_TO_CONVERT, INTERRUPTED = 3, 130            -- slurm_plugin/cli/filter.py; a shell's code for Ctrl-C
local DEFAULT_TIMEOUT_S = 10
local MAX_SCRIPT_BYTES = 4 * 1024 * 1024                  -- Slurm's own limit (max_script_size)

local function read(path, mode)
  local file = io.open(path, mode or "r")
  if not file then return nil end
  local text = file:read(MAX_SCRIPT_BYTES)                -- nil for a directory
  file:close()
  return text
end

local function quote(word) return "'" .. word:gsub("'", "'\\''") .. "'" end

-- The exit code of os.execute as a shell would say it: Lua 5.1 returns a wait status, later ones (ok, kind, code).
local function exit_code(first, kind, code)
  if type(first) ~= "number" then return kind == "signal" and 128 + code or code or 1 end
  return first < 256 and (first == 0 and 0 or 128 + first % 128) or math.floor(first / 256)
end

-- The words that sbatch was called with.
local function command_line()
  local words = {}
  for word in (read("/proc/self/cmdline", "rb") or ""):gmatch("([^%z]*)%z") do words[#words + 1] = word end
  table.remove(words, 1)
  return words
end

-- The script, as sbatch has found it; nil for standard input and --wrap. Only the JSON has it. One whose path holds
-- a quote is not found, and its job is left alone.
local function script_of(options)
  local json = slurm.json_cli_options(options) or ""
  return (json:gsub("\\", "")):match('"argv":%s*%["([^"]+)"')
end

-- Whether a script may have to be converted. A cheap guess, so that other jobs start no process: what its directives
-- mean is for the converter to say.
local function is_candidate(script, any_script)
  local text = script and read(script)
  if not text or text:sub(1, 2) ~= "#!" or text:find(DONE, 1, true) then return false end
  return any_script or text:find("\n" .. MARK, 1, true) ~= nil
end

-- A word that nothing but our converter can print, which is told it.
local function new_nonce()
  local source = io.open("/dev/urandom", "rb")
  local bytes = source and source:read(16)
  if source then source:close() end
  if not bytes or #bytes < 16 then error("no random bytes from /dev/urandom", 0) end
  return (bytes:gsub(".", function(byte) return string.format("%02x", byte:byte()) end))
end

-- What the converter has to say of a script, each on a line of its own.
local function notes_in(said)
  local notes = {}
  for line in said:gmatch("[^\n]+") do
    if line:sub(1, 11) == "hetstream: " then notes[#notes + 1] = line .. "\n" end
  end
  return table.concat(notes)
end

-- Returns the exit code, what was printed, the last line of what was said, and the notes in it.
local function run(program, arguments, timeout_s, nonce)
  local out, err = os.tmpname(), os.tmpname()
  local code = exit_code(os.execute(string.format(
    "HETSTREAM_FILTER_NONCE=%s timeout --foreground -k 1 %s %s internal filter %s </dev/null >%s 2>%s",
    nonce, timeout_s, quote(program), arguments, quote(out), quote(err))))
  local printed, said = read(out) or "", read(err) or ""
  os.remove(out)
  os.remove(err)
  local last = ""
  for line in said:gmatch("[^\n]+") do last = line end
  return code, printed, (last:gsub("^hetstream internal filter: ", "")), notes_in(said)
end

local function submit(policy, program, options, offset)
  if options.type ~= "sbatch" or policy.convert == false then return end
  if (tonumber(offset) or 0) > 0 then return end          -- a component that is not the first: one note is enough
  local script = script_of(options)
  local default = policy.eligible and policy.eligible(options) or ""
  if type(default) ~= "string" or not is_candidate(script, default ~= "") then return end
  local quoted = { quote(default), quote(script) }
  for _, word in ipairs(command_line()) do quoted[#quoted + 1] = quote(word) end
  local timeout_s = tonumber(policy.timeout_s) or DEFAULT_TIMEOUT_S
  local nonce = new_nonce()
  local code, printed, said, notes = run(program, table.concat(quoted, " "), timeout_s, nonce)
  if code == 0 or code == NOTHING_TO_CONVERT then io.stderr:write(notes) end
  if code == NOTHING_TO_CONVERT then return end
  if code == INTERRUPTED then os.exit(INTERRUPTED) end
  -- The user's Python may print what it likes (sitecustomize, a .pth file): the plan is what stands between our words.
  local command = printed:match("hetstream%-plan%-" .. nonce .. "\n(.+)\nhetstream%-end%-" .. nonce)
  if code ~= 0 or not command then
    error(code == 124 and "the converter took longer than " .. timeout_s .. " s" or said ~= "" and said or "exit code " .. code, 0)
  end
  -- The very sbatch that the user called, whatever PATH says: it is the parent of this shell. Nothing is removed here:
  -- the command removes what the converter has made.
  code = exit_code(os.execute("sbatch=$(readlink /proc/$PPID/exe)\n" .. command))
  os.exit(code)
end

-- Wrap the functions that the site's file has defined. Their refusals stand, and their errors are theirs.
return function(policy, program)
  if type(policy) ~= "table" then policy = {} end         -- an error text: there is no policy
  local site = slurm_cli_pre_submit
  function slurm_cli_pre_submit(options, offset)
    local rc = slurm.SUCCESS
    if site then rc = site(options, offset) end
    if type(rc) == "number" and rc ~= slurm.SUCCESS then return rc end
    local ok, problem = pcall(submit, policy, program, options, offset)
    if not ok then io.stderr:write("hetstream: submitted without data workers: " .. tostring(problem) .. "\n") end
    return rc
  end
end
