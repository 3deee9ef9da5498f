-- ARGV: [5] id. Returns the member and its spec. It is joining until its worker reports otherwise.
local id = ARGV[5]

local member = member_of(id)
if not member then
  return {'unknown-instance'}
end
if member.leaving then
  return {'leaving', id}
end
if member.state == 'draining' then
  member.state = 'joining'
  member.drain_deadline = nil
  save(id, member)
  change('state-changed', id, member)
end
return {'ok', cmsgpack.pack(member), redis.call('HGET', SPECS, id)}
