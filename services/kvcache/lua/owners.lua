-- The keys of the index, and functions that all scripts share; prepended to each script.
--
-- KEYS  1 owners: engine id → record, 2 live: token → "<epoch> <engine id>", 3 meta: counters.
-- A token is 6 bytes that stand for one life of an engine's blocks. A new epoch, a clear and a
-- snapshot each take a new token, so that dropping all entries of an owner is one write. A record
-- is token, token of a snapshot under way, then "<epoch> <sequence> <part> <seen>".
-- An entry (key: prefix .. 16-byte hash) is a row of 7 bytes per owner: token, kinds as bits.
local OWNERS, LIVE, META = KEYS[1], KEYS[2], KEYS[3]
local NONE = string.rep('\0', 6)
local ENTRY = 7

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- Never the same token twice, even if Redis has lost the counter: it starts from the clock.
local function new_token(engine, epoch, pending)
  local last = tonumber(redis.call('HGET', META, 'token') or '0')
  local n = math.max(last + 1, now_ms())
  redis.call('HSET', META, 'token', string.format('%.0f', n))
  local bytes = {}
  for i = 6, 1, -1 do
    bytes[i] = string.char(n % 256)
    n = math.floor(n / 256)
  end
  local token = table.concat(bytes)
  redis.call('HSET', LIVE, token, pending and '' or string.format('%.0f %s', epoch, engine))
  return token
end

local function load_owner(engine)
  local raw = redis.call('HGET', OWNERS, engine)
  if not raw then return nil end
  local epoch, sequence, part, seen = string.match(string.sub(raw, 13), '^(%S+) (%S+) (%S+) (%S+)$')
  return {
    token = string.sub(raw, 1, 6),
    pending = string.sub(raw, 7, 12),
    epoch = tonumber(epoch),
    sequence = tonumber(sequence),
    part = tonumber(part),
    seen = tonumber(seen),
  }
end

local function save_owner(engine, o)
  local tail = string.format('%.0f %.0f %.0f %.0f', o.epoch, o.sequence, o.part, o.seen)
  redis.call('HSET', OWNERS, engine, o.token .. o.pending .. tail)
end

local function drop_token(token)
  if token ~= NONE then redis.call('HDEL', LIVE, token) end
  return NONE
end

local function live_tokens()
  local flat, alive = redis.call('HGETALL', LIVE), {}
  for i = 1, #flat, 2 do alive[flat[i]] = true end
  return alive
end
