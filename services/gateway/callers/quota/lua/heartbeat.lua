-- Renew this gateway's entry; returns the number of live gateways.
--
-- KEYS: gateways (sorted set, score expiry). ARGV: gateway, seconds.
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), ARGV[1])
redis.call('EXPIRE', KEYS[1], math.ceil(tonumber(ARGV[2])) + 60)
return redis.call('ZCARD', KEYS[1])
