-- Renew the leases of this gateway's running requests, of one tenant and scope. Leases that were lost
-- with the store are restored; those of a gateway that died expire.
--
-- KEYS: leases, owners. ARGV: gateway, lease in seconds, request ids.
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local lease = tonumber(ARGV[2])
for i = 3, #ARGV do
  local owner = redis.call('HGET', KEYS[2], ARGV[i])
  if not owner or owner == ARGV[1] then
    redis.call('ZADD', KEYS[1], now + lease, ARGV[i])
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[1])
  end
end
redis.call('EXPIRE', KEYS[1], math.ceil(lease) + 60)
redis.call('EXPIRE', KEYS[2], math.ceil(lease) + 60)
return 1
