-- The longest contiguous prefix that each owner holds, for a whole prompt in one call.
--
-- KEYS  1 live: token → "<epoch> <engine id>".
-- ARGV  1 the prompt's hashes, 16 bytes each, 2 state needed (0/1), 3 entry prefix.
-- Returns a flat list of "<epoch> <engine id>", number of blocks.
local HISTORY, STATE, CHUNK = 1, 2, 256
local hashes, needs_state, prefix = ARGV[1], ARGV[2] == '1', ARGV[3]
local flat, names = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #flat, 2 do
  if flat[i + 1] ~= '' then names[flat[i]] = flat[i + 1] end
end

local held, found = nil, {} -- tokens that hold all blocks so far (nil: no block seen yet)
local depth, before = 0, nil

local function read(value)
  local now = {}
  for p = 1, #value, 7 do
    local token, bits = string.sub(value, p, p + 5), string.byte(value, p + 6)
    if names[token] and bits % 2 == HISTORY and (not held or held[token]) then now[token] = bits end
  end
  return now
end

local function settle()
  for token, bits in pairs(held) do
    if not needs_state or bits >= STATE then found[token] = depth end
  end
end

local total = #hashes / 16
for start = 0, total - 1, CHUNK do
  local keys = {}
  for i = start, math.min(start + CHUNK, total) - 1 do
    keys[#keys + 1] = prefix .. string.sub(hashes, i * 16 + 1, i * 16 + 16)
  end
  local values = redis.call('MGET', unpack(keys))
  for i = 1, #keys do
    local value = values[i]
    -- Blocks of one chain mostly have the same owners: an equal entry changes nothing.
    if value ~= before then
      local now = value and read(value) or {}
      if held and not needs_state then settle() end
      held, before = now, value
    end
    if not next(held) then
      total = 0
      break
    end
    depth = depth + 1
    if needs_state then settle() end
  end
  if total == 0 then break end
end
if held and next(held) then settle() end

local reply = {}
for token, blocks in pairs(found) do
  reply[#reply + 1] = names[token]
  reply[#reply + 1] = blocks
end
return reply
