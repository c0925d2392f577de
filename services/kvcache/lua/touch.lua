-- Mark engines as alive, and remove the records of engines that are silent for too long.
--
-- ARGV  1 milliseconds of silence after which a record is removed, then engines that are alive.
-- Returns the number of records removed.
local now, silence, removed = now_ms(), tonumber(ARGV[1]), 0
for i = 2, #ARGV do
  local o = load_owner(ARGV[i])
  if o then
    o.seen = now
    save_owner(ARGV[i], o)
  end
end
local engines = redis.call('HKEYS', OWNERS)
for i = 1, #engines do
  local o = load_owner(engines[i])
  if now - o.seen > silence then
    drop_token(o.token)
    drop_token(o.pending)
    redis.call('HDEL', OWNERS, engines[i])
    removed = removed + 1
  end
end
return removed
