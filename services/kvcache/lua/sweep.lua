-- Remove dead owners from the given entries, delete entries without owners, renew the others.
--
-- ARGV  1 seconds to live, 2 entries to delete although they have owners, then entry keys.
-- Returns {entries deleted, how many of them had owners}.
local ttl, surplus = ARGV[1], tonumber(ARGV[2])
local alive, deleted, given_up = live_tokens(), 0, 0
local remembered = {}

local function living(value)
  local kept = {}
  for p = 1, #value, ENTRY do
    if alive[string.sub(value, p, p + 5)] then kept[#kept + 1] = string.sub(value, p, p + 6) end
  end
  return table.concat(kept)
end

for i = 3, #ARGV do
  local value = redis.call('GET', ARGV[i])
  if value then
    local left = remembered[value] or living(value)
    remembered[value] = left
    local surplus_now = left ~= '' and given_up < surplus
    if left == '' or surplus_now then
      redis.call('DEL', ARGV[i])
      deleted = deleted + 1
      if surplus_now then given_up = given_up + 1 end
    elseif left ~= value then
      redis.call('SET', ARGV[i], left, 'EX', ttl)
    else
      redis.call('EXPIRE', ARGV[i], ttl)
    end
  end
end
if deleted > 0 then redis.call('HINCRBY', META, 'entries', -deleted) end
return {deleted, given_up}
