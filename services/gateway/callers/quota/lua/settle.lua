-- End a request: delete its leases and replace the reserved tokens by those that were used.
--
-- KEYS as in admit.lua. ARGV: gateway, request id; then per scope tokens reserved, tokens used
-- and tokens per minute ("" is no limit).
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local owners = KEYS[#KEYS]
local owner = redis.call('HGET', owners, ARGV[2])
-- If this gateway's lease has expired, another gateway may have taken the id.
local ours = not owner or owner == ARGV[1]
for i = 1, (#KEYS - 1) / 2 do
  local at = 2 + 3 * (i - 1)
  local reserved, used, tpm = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  if ours then redis.call('ZREM', KEYS[2 * i], ARGV[2]) end
  if tpm then
    local bucket = KEYS[2 * i - 1]
    local got = redis.call('HMGET', bucket, 'tokens', 'tokens_at')
    local have = tpm
    if got[1] then
      have = math.min(tpm, tonumber(got[1]) + math.max(0, now - tonumber(got[2])) * tpm / 60)
    end
    have = math.min(tpm, have + reserved - used)
    redis.call('HSET', bucket, 'tokens', string.format('%.6f', have),
      'tokens_at', string.format('%.6f', now))
    redis.call('EXPIRE', bucket, 3600)
  end
end
if ours then redis.call('HDEL', owners, ARGV[2]) end
return 1
