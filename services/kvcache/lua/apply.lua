-- Apply a piece of a batch of an engine's events, or refuse it. Check and write are one step.
--
-- ARGV  1 engine, 2 epoch, 3 sequence, 4 part of a snapshot or -1, 5 last part (0/1),
--       6 first piece of the batch (0/1), 7 last piece (0/1), 8 entry prefix, 9 seconds to live,
--       10 most entries, then pairs: "S<bits>" stored, "R<bits>" removed, "C" cleared; hashes.
-- Returns {status, acknowledged sequence, entries refused because of the cap, entries}.
local engine, epoch, sequence = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local part, last_part = tonumber(ARGV[4]), ARGV[5] == '1'
local first, final = ARGV[6] == '1', ARGV[7] == '1'
local prefix, ttl, cap = ARGV[8], ARGV[9], tonumber(ARGV[10])
local entries = tonumber(redis.call('HGET', META, 'entries') or '0')

local o = load_owner(engine)
if o and o.epoch > epoch then return {'stale', o.sequence, 0, entries} end
local known = o and o.epoch == epoch
if known and sequence <= o.sequence then return {'duplicate', o.sequence, 0, entries} end

-- Whether this piece continues the stored state; a snapshot may begin at any state.
local function follows()
  if first and part == 0 then return true end
  if not known then return first and part < 0 and sequence == 1 end
  if sequence ~= o.sequence + 1 and part ~= 0 then return false end
  local token = part < 0 and o.token or o.pending
  if redis.call('HEXISTS', LIVE, token) == 0 then return false end
  if part < 0 then return o.pending == NONE end
  return not first or part == o.part + 1
end

if not known and o then
  -- A new life of the engine: the blocks of the old one are gone, even if this batch is refused.
  drop_token(o.token)
  drop_token(o.pending)
  o = {token = NONE, pending = NONE, epoch = epoch, sequence = 0, part = -1, seen = now_ms()}
  save_owner(engine, o)
end
if not follows() then return {'gap', known and o.sequence or 0, 0, entries} end
if not known then
  o = {token = new_token(engine, epoch, false), pending = NONE, epoch = epoch, sequence = 0, part = -1}
end
if part == 0 and first then
  drop_token(o.pending)
  o.pending = new_token(engine, epoch, true)
end

local token = o.pending ~= NONE and o.pending or o.token
local alive = live_tokens()
local remembered, refused = {}, 0

-- The entry with this engine's bits added and without dead owners.
local function with(value, bits)
  local kept, found = {}, false
  for p = 1, #value, ENTRY do
    local t = string.sub(value, p, p + 5)
    if t == token then
      found = true
      kept[#kept + 1] = t .. string.char(bit.bor(string.byte(value, p + 6), bits))
    elseif alive[t] then
      kept[#kept + 1] = string.sub(value, p, p + 6)
    end
  end
  if not found then kept[#kept + 1] = token .. string.char(bits) end
  return table.concat(kept)
end

local function without(value, bits)
  local kept = {}
  for p = 1, #value, ENTRY do
    local t, had = string.sub(value, p, p + 5), string.byte(value, p + 6)
    local left = t == token and bit.band(had, bit.bnot(bits)) or had
    if alive[t] and left ~= 0 then kept[#kept + 1] = t .. string.char(left) end
  end
  return table.concat(kept)
end

local function store(hashes, bits)
  for i = 1, #hashes, 16 do
    local key = prefix .. string.sub(hashes, i, i + 15)
    local value = redis.call('GET', key)
    if value or entries < cap then
      if not value then entries = entries + 1 end
      local from = value or ''
      local to = remembered[from] or with(from, bits)
      remembered[from] = to
      redis.call('SET', key, to, 'EX', ttl)
    else
      refused = refused + 1
    end
  end
end

local function remove(hashes, bits)
  for i = 1, #hashes, 16 do
    local key = prefix .. string.sub(hashes, i, i + 15)
    local value = redis.call('GET', key)
    local left = value and without(value, bits)
    if value and left == '' then
      redis.call('DEL', key)
      entries = entries - 1
    elseif value and left ~= value then
      redis.call('SET', key, left, 'EX', ttl)
    end
  end
end

for i = 11, #ARGV, 2 do
  local kind, bits = string.sub(ARGV[i], 1, 1), tonumber(string.sub(ARGV[i], 2) or '0')
  remembered = {}
  if kind == 'S' then
    store(ARGV[i + 1], bits)
  elseif kind == 'R' then
    remove(ARGV[i + 1], bits)
  else
    local pending = o.pending ~= NONE
    drop_token(token)
    token = new_token(engine, epoch, pending)
    if pending then o.pending = token else o.token = token end
    alive = live_tokens()
  end
end

if final then
  o.sequence = sequence
  o.part = part
  if part >= 0 and last_part then
    drop_token(o.token)
    o.token, o.pending, o.part = o.pending, NONE, -1
    redis.call('HSET', LIVE, o.token, string.format('%.0f %s', epoch, engine))
  end
end
o.seen = now_ms()
save_owner(engine, o)
entries = math.max(entries, 0)
redis.call('HSET', META, 'entries', entries)
return {'applied', o.sequence, refused, entries}
